"""The contract: a pass is its configuration, a frozen value with one verb, in one of three sizes.

The verb is `LayerPass.solve`, `BlockPass.solve_block` or `ModelPass.apply`. All else that a pass can say of itself has
an answer already, which most passes keep:

    every pass     facts      what is true of a layer after it, its options considered
                   requires   what it needs of the run: data, a teacher, the uncompressed model, ... (`Requirements`)
                   choose     the linears that it works on, of those that there are
                   for_layer  itself with the options of one layer
                   left_out   patterns of layers that it leaves alone
                   check      why it cannot work on a linear
                   spec       how it stores weights
                   cache      how it has keys and values rounded
                   zeros      the sparsity that it owes a layer
                   memory     what it holds at its peak
    LayerPass      observer   what it gathers from the inputs that layers share
                   watches    what it gathers from the inputs of one layer
                   survey     what it must know of all layers first
    ModelPass      asks       what it asks of a language model
                   outcome    the configuration of the model that it leaves
"""

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
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import Self

from compress.api.facts import Fact, LayerFacts, Log, Requirements
from compress.api.memory import ProblemSize
from compress.api.observers import CrossGram, Nothing, Observer
from compress.api.options import patterns
from compress.formats.base import CacheScheme
from compress.model.linear import CompressedLinear, Weight
from compress.model.objective import LMObjective
from compress.model.structure.links import Group, Link
from compress.model.structure.permutations import Permutation
from compress.model.structure.select import chosen, select
from compress.numerics.sparse.positions import Sparsity
from compress.weights.base import InputTransform, WeightPart
from compress.weights.layer import LayerScheme

if TYPE_CHECKING:
    from compress.api.context import Run

COPIES = 4  # of a weight in float32: itself, what becomes of it, and two on the way

ActivationScale = Literal["token", "static"]


@dataclass(frozen=True)
class Zeros:
    """What a pruning pass owes a layer: the sparsity that was asked for it, and the share of zeros that this comes to.

    due: what the pattern makes of `asked` in whole units; a tail that stays dense is not in it.
    """

    asked: float
    due: float


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

    @property
    def requires(self) -> Requirements:
        """What it needs of the run."""
        return Requirements(data=True)

    def choose(self, names: Sequence[str], where: str) -> list[str]:
        """The linears that it works on, of all there are, by full name; where: its label.

        Raises TargetError for patterns that match nothing.
        """
        return select(names, self.targets, self.ignore, where)

    def for_layer(self, name: str) -> Self | None:
        """The pass with the options that it has for one of its layers; None where it leaves the layer alone."""
        return self

    def check(self, layer: LayerFacts) -> str | None:
        """Why it cannot work on a linear; None where it can. Asked of `for_layer`."""
        after = self.becomes(LayerScheme(layer.shape))
        return next((reason for part in after.parts if (reason := part.refuses(layer.shape)) is not None), None)

    def zeros(self, shape: tuple[int, int], sparsity: float | None = None) -> Zeros | None:
        """What it owes a layer of this shape, at its own sparsity or another; None: it does not prune."""
        return None

    def memory(self, size: ProblemSize) -> int:
        """About what it holds at its peak besides the model, the activations between blocks and what was observed.

        size: of a linear, for a layer pass; of a block, for a block pass; of the model.
        """
        return 0

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
    weight before a pass of the same sweep quantized it, for passes that require it.
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

    def watches(self) -> Callable[[int, torch.device], Observer] | None:
        """What to gather beside `observes`, for this layer alone: it becomes `layer.inputs`. None: nothing."""
        return None

    def survey(self) -> Survey | None:
        """What is to be known of all layers before the first is solved. None: nothing."""
        return None

    @property
    def requires(self) -> Requirements:
        survey = self.survey()
        data = self.observer is not Nothing or (survey is not None and survey.observer is not Nothing)
        return Requirements(data=data, reference=issubclass(self.observer, CrossGram))

    @property
    def observer(self) -> type[Observer]:
        """What these options gather; `observes` unless a pass says otherwise."""
        return self.observes

    def memory(self, size: ProblemSize) -> int:
        return COPIES * 4 * size.shape[0] * size.shape[1]

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
        """What the uncompressed model has behind this block; only for passes that require it."""
        ...

    def original(self, batch: int) -> Tensor:
        """What the block made of the same inputs before the sweep; only for passes that require it."""
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

    def memory(self, size: ProblemSize) -> int:
        return max(size.forward_bytes, COPIES * 4 * size.largest)

    @abstractmethod
    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        """Rewrite the block in place; every function-preserving rewrite proves itself first."""


class ModelPass(Pass):
    """The whole model: training and global decisions."""

    def asks(self, lm_objective: LMObjective, where: str) -> LMObjective:
        """What it asks a model for that predicts so; where: its label. Raises RecipeError for options that say nothing.

        Called before any work, too.
        """
        return lm_objective

    def outcome(self, model: PreTrainedModel, where: str) -> PretrainedConfig:
        """The configuration of the model that it leaves, for those that require `new_shape`; where: its label.

        No weight is looked at, they may be on the meta device. Raises TargetError, beginning with `where`, for what
        cannot be done; ModelError where no configuration says it.
        """
        return model.config

    @abstractmethod
    def apply(self, model: nn.Module, run: Run) -> None:
        """Change the model in place; all of it is in memory."""


Step = tuple[str, Pass, list[str]]
"""(label, pass, full names of the linears it works on)."""
