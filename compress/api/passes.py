"""The contract: a pass is its configuration, a frozen value with one verb, in one of three sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from jaxtyping import Bool, Float
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn
from typing_extensions import Self

from compress.api.facts import Fact, Log
from compress.api.memory import ProblemSize
from compress.api.observers import CrossGram, Nothing, Observer
from compress.api.options import patterns
from compress.formats.base import CacheScheme
from compress.model.linear import CompressedLinear, Weight
from compress.model.objective import LMObjective
from compress.model.structure.links import Group, Link
from compress.model.structure.permutations import Permutation
from compress.model.structure.select import chosen
from compress.numerics.sparse.positions import Sparsity
from compress.weights.base import InputTransform, WeightPart
from compress.weights.layer import LayerScheme

if TYPE_CHECKING:
    from compress.api.context import Run

COPIES = 4  # of a weight in float32: itself, what becomes of it, and two on the way

ActivationScale = Literal["token", "static"]


class Pass(BaseModel, ABC):
    """One step of a recipe. A pass IS its configuration: a frozen value with one verb.

    paper: where the method was published. after: facts that must be true of the model before; never_after: facts that
    must not be; makes: facts that are true afterwards. targets, ignore: globs or 're:' patterns of full module names;
    a pattern that matches nothing is an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    paper: ClassVar[str]
    after: ClassVar[frozenset[Fact]] = frozenset()
    never_after: ClassVar[frozenset[Fact]] = frozenset()
    makes: ClassVar[frozenset[Fact]] = frozenset()

    targets: tuple[str, ...] = Field(
        default=("*",), min_length=1, description="which linears: globs, or regular expressions after 're:'"
    )
    ignore: tuple[str, ...] = Field(default=(), description="which of them to leave alone")

    _patterns = field_validator("targets", "ignore", mode="before")(patterns)

    @classmethod
    def key(cls) -> str:
        """The name in a recipe, which is the name of the file; a class of one's own elsewhere is called by its name."""
        package, _, file = cls.__module__.rpartition(".")
        return file if package.endswith(".passes") else cls.__name__.lower()

    def facts(self) -> frozenset[Fact]:
        """What this pass makes of the layers it works on, its options considered."""
        return self.makes

    def becomes(self, before: LayerScheme) -> LayerScheme:
        """How a layer that is stored as `before` will be stored after this pass, as far as can be said beforehand."""
        return before

    def sparsities(self, shape: tuple[int, int]) -> list[Sparsity]:
        """The ways to store the mask that it will give a layer of this shape; none where it gives none."""
        return []

    @property
    def cache(self) -> CacheScheme | None:
        """How it has keys and values rounded, in the attentions that hold what it works on; None: not at all."""
        return None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Patterns of the layers that it leaves alone although they match its targets."""
        return self.ignore

    def takes(self, name: str) -> bool:
        """Whether a module is one to work on, by its full name."""
        return chosen(name, self.targets, self.ignore)


@dataclass(frozen=True)
class Layer:
    """What a solver may know of the layer besides its weight and inputs.

    name: full module name. mask: True where weights are kept, or None. storage: the dtype that scales are stored in.
    log: log(kind, message, **figures) writes to the journal. inputs: what `watches` gathered, or None. shared_absmax:
    the largest magnitude among the weights that read the same input, this one included; servers fuse such layers, so
    what scales have in common is found from it. allocated: what the pass's survey gave to the layer. unquantized: its
    weight before a pass of the same sweep quantized it, for passes with `needs_unquantized`.
    """

    name: str
    mask: Bool[Tensor, "out in"] | None
    storage: torch.dtype
    log: Log
    inputs: Any = None
    shared_absmax: float | None = None
    allocated: Any = None
    unquantized: Float[Tensor, "out in"] | None = None


@dataclass(frozen=True)
class Zeros:
    """What a pruning pass owes a layer: the sparsity that was asked for it, and the share of zeros that this comes to.

    due: what the pattern makes of `asked` in whole units; a tail that stays dense is not in it.
    """

    asked: float
    due: float


@dataclass(frozen=True)
class Solution:
    """What becomes of a layer.

    weight: what replaces all parts of its weight: floats, codes, or parts; None: the parts stay as they are. added:
    further parts. transforms: of its input, each in place of one of its own kind. mask: None: as before. zeros: what
    must be zero, which is counted in the checkpoint.
    """

    weight: Weight | None = None
    mask: Bool[Tensor, "out in"] | None = None
    transforms: tuple[InputTransform, ...] = ()
    zeros: Zeros | None = None
    added: tuple[WeightPart, ...] = ()


@dataclass(frozen=True)
class Surveyed:
    """One layer as a survey sees it. seen: what the survey's observer gathered. rows: sampled inputs, [rows, in]."""

    layer: Layer
    module: CompressedLinear
    seen: Any
    rows: Float[Tensor, "rows in"] | None

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The weight in float32."""
        return self.module.weight.float()


class Survey(Protocol):
    """A look at all layers of a pass, block by block, before the sweep solves the first: the model is as it came."""

    @property
    def observer(self) -> type[Observer]:
        """What is gathered from the inputs of every layer; Nothing: the blocks are not even run."""
        ...

    def collect(self, block: Sequence[Surveyed]) -> Mapping[str, Any]:
        """What is to be remembered of the layers of a block, by full name."""
        ...

    def allocate(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """What every layer is told as `Layer.decided`, from what was remembered of all."""
        ...


class LayerPass(Pass):
    """One weight in, one compressed weight out (GPTQ, Wanda, RTN, ...).

    observes: what to gather from the layer's inputs.
    """

    observes: ClassVar[type[Observer]] = Nothing

    true_sequential: bool = Field(
        default=True, description="calibrate each layer on the output of the compressed layers before it in the block"
    )

    def for_layer(self, name: str) -> Self | None:
        """The pass with the options that it has for one of its layers; None where it leaves the layer alone."""
        return self

    def watches(self) -> Callable[[int, torch.device], Observer] | None:
        """What to gather beside `observes`, for this layer alone: it becomes `layer.inputs`. None: nothing."""
        return None

    def survey(self) -> Survey | None:
        """What is to be known of all layers before the first is solved. None: nothing."""
        return None

    @property
    def needs_data(self) -> bool:
        """Whether calibration inputs are looked at."""
        survey = self.survey()
        return self.observer is not Nothing or (survey is not None and survey.observer is not Nothing)

    @property
    def observer(self) -> type[Observer]:
        """What these options gather; `observes` unless a pass says otherwise."""
        return self.observes

    @property
    def needs_reference(self) -> bool:
        """Whether the observer compares inputs with those in the uncompressed model, which then runs alongside."""
        return issubclass(self.observer, CrossGram)

    @property
    def needs_unquantized(self) -> bool:
        """Whether the weight of a layer before it was quantized, in the same sweep, is looked at."""
        return False

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        """About what `solve` holds at its peak for a weight [out, in], what was observed apart."""
        return COPIES * 4 * shape[0] * shape[1]

    @abstractmethod
    def solve(self, weight: Float[Tensor, "out in"], seen: Any, layer: Layer) -> Solution:
        """The compressed layer; `seen` is an instance of `observer`. Pure: nothing is assigned, printed or timed."""


class BlockInputs(Protocol):
    """What reaches a block, as a block pass sees it."""

    groups: list[Group]
    """Groups of the block's linears that the pass is to work on, in the order of execution."""
    names: list[str]
    """The linears inside the block that the pass is to work on; groups may hold others that read the same tensor."""

    @property
    def name(self) -> str:
        """The block's full name."""
        ...

    @property
    def label(self) -> str:
        """What errors call the pass at work on this block."""
        ...

    @property
    def storage(self) -> torch.dtype:
        """The dtype that scales and dense tensors will be stored in."""
        ...

    @property
    def links(self) -> list[Link]:
        """Links to readers of which the pass is to work on one at least: where a scale per channel can be folded."""
        ...

    @property
    def permutations(self) -> list[Permutation]:
        """Channels that may trade places, with readers of which the pass is to work on one at least."""
        ...

    def observe(self, observer: type[Observer]) -> dict[Group, Any]:
        """Forward all calibration inputs once; what an observer gathers at the input of each group."""
        ...

    def probe(self, block: nn.Module) -> Tensor:
        """The block's output (or a copy's) on one short fixed input, for proofs."""
        ...

    @property
    def batches(self) -> int:
        """How many batches of calibration inputs there are."""
        ...

    def forward(self, block: nn.Module, batch: int) -> Tensor:
        """The output of the block (or a copy) for one batch."""
        ...

    def reference(self, batch: int) -> Tensor:
        """What the uncompressed model has behind this block; only for passes with `needs_reference`."""
        ...

    def original(self, batch: int) -> Tensor:
        """What the block made of the same inputs before the sweep; only for passes with `needs_original`."""
        ...

    @property
    def work(self) -> Path | None:
        """A folder for what must survive a killed run until the block is done; None where the run has none."""
        ...

    def layer(self, name: str) -> Layer:
        """What a solver may know of a linear."""
        ...

    def put(self, name: str, solution: Solution) -> None:
        """Put what became of a linear in place, in the form that it will be stored in, and measure what it did."""
        ...


class BlockPass(Pass):
    """One block and the inputs that reach it (SmoothQuant, AWQ, channel permutation, ...)."""

    @property
    def needs_data(self) -> bool:
        """Whether calibration inputs are looked at."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether the block's outputs in the uncompressed model are looked at, which then runs alongside."""
        return False

    @property
    def needs_original(self) -> bool:
        """Whether the block is compared with what it was before the sweep, in which passes must have changed it."""
        return False

    def memory_bytes(self, extent: ProblemSize) -> int:
        """About what it holds at its peak beside the block and the activations between blocks."""
        return max(extent.forward_bytes, COPIES * 4 * extent.largest)

    @abstractmethod
    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        """Rewrite the block in place; every function-preserving rewrite proves itself first."""


class ModelPass(Pass):
    """The whole model: training and global decisions."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the uncompressed model is looked at, which `run.open_teacher` then gives."""
        return False

    @property
    def other_teacher(self) -> str | None:
        """The source of a model that is looked at instead of the uncompressed one."""
        return None

    @property
    def predicts(self) -> bool:
        """Whether it looks at how well the model predicts the text, for which `run.prediction` then stands."""
        return False

    def asks(self, lm_objective: LMObjective, where: str) -> LMObjective:
        """What it asks a model for that predicts so; where: its label. Raises RecipeError for options that say nothing.

        Called before any work, too.
        """
        return lm_objective

    def memory_bytes(self, extent: ProblemSize) -> int:
        """About what it needs beside the model itself."""
        return 0

    @abstractmethod
    def apply(self, model: nn.Module, run: Run) -> None:
        """Change the model in place; all of it is in memory."""


Step = tuple[str, Pass, list[str]]
"""(label, pass, full names of the linears it works on)."""
