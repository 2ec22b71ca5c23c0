"""The contract: a pass is its configuration, a frozen value with one verb, in one of three sizes.

The verb is `LayerPass.solve`, `BlockPass.solve_block` or `ModelPass.apply`. All other methods have defaults, which most
passes keep:

    every pass     facts            facts that are true of a layer after the pass
                   requires         the needs of the pass: data, a teacher, the uncompressed model, ... (`Requirements`)
                   choose           the linears that the pass works on
                   on_model         the pass with its patterns in terms of the model's names
                   for_layer        the pass with the options of one layer
                   left_out         patterns of layers that the pass skips
                   check            the reason why the pass cannot work on a linear
                   becomes          the storage scheme of a layer after the pass
                   at_most          the same, with the transforms that may stay at the layer
                   sparsities       the storage schemes of the masks that the pass makes
                   cache            the rounding of keys and values
                   zeros            the sparsity that the pass must reach in a layer
                   uneven           whether only the mean of the sparsities is known before the run
                   unmet            the reason why the pass finds nothing to work on in its layers
                   mismatch         the reason why a later pass is not the one that this pass prepares a layer for
                   memory           an estimate of the peak memory
                   alternatives     further forms that a layer may get, which only the run decides
                   survey           a look at all layers before the first one is solved
                   settled          the pass with what its survey decided
    LayerPass      observer         the statistics of inputs that several layers share
                   by_rows          whether rows of a weight are solved apart
                   watches          further statistics of the inputs of one layer
    ModelPass      rehearsal        the pass that a plan runs on random weights
                   adapt_objective  the language-model objective with the options of the pass
                   outcome          the configuration of the model after the pass
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, field_validator
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import Self

from compress.checkpoint.formats.base import Format
from compress.layers.scheme import LayerScheme
from compress.models.caches.scheme import CacheScheme
from compress.models.kinds.objective import LMObjective, check_learns
from compress.models.structure.select import ModuleNames, chosen, select
from compress.numerics.sparse.positions import SparseLayout
from compress.passes.contract.facts import Fact, LayerFacts, Log, Requirements
from compress.passes.contract.layers import BlockInputs, Layer, Solution, Surveyed, Zeros
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import CrossGram, Nothing, Observer
from compress.passes.contract.options import Options, patterns

if TYPE_CHECKING:
    from compress.passes.contract.context import Run

COPIES = 4  # of a weight in float32: the original, the result, and two intermediate ones

ActivationScale = Literal["token", "group", "static"]


class Survey(ABC):
    """A walk over all layers of a pass, block by block, before the sweep solves the first one (original model).

    observer: the statistics of the inputs of every layer; Nothing: the blocks are not run.
    """

    observer: type[Observer]

    @property
    def whole(self) -> bool:
        """Whether it first needs the whole model, with all weights in memory."""
        return False

    @property
    def data(self) -> bool:
        """Whether it needs calibration token ids."""
        return self.whole or self.observer is not Nothing

    def memory(self, size: ProblemSize) -> int:
        """Estimate the peak memory of `prepare` in bytes, without the model."""
        return 0

    def prepare(
        self, model: nn.Module, names: Sequence[str], batches: Sequence[Int[Tensor, "batch length"]], run: Run
    ) -> None:
        """Read what is needed of the whole model; called before the walk if `whole`. names: of the linears.

        batches: the calibration ids of this process.
        """
        return

    @abstractmethod
    def collect(self, block: Sequence[Surveyed]) -> Mapping[str, Any]:
        """The figures of the layers of a block, by full name."""

    @abstractmethod
    def allocate(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """The value of `Layer.allocated` for every layer, by full name. found: the collected figures of all layers."""

    def note(self, allocated: Mapping[str, Any]) -> str | None:
        """What the journal says of the result, or None."""
        return None


class Pass(Options, ABC):
    """One step of a recipe. A pass IS its configuration: a frozen value with one verb.

    paper: the URL of the publication. use_for, not_for: sentences for the page of the pass, what it is good for, and
    where something else is better. after: facts that must be true of the model before the pass. never_after: facts
    that must be false before the pass. makes: facts that are true after the pass. prepares: the fact that a later pass
    must make true of every layer of this pass, which is of no use alone; None: it prepares nothing. repeats: the name
    of the option that sets how many equal steps the pass takes, for a prediction of its time; None: it takes none.
    targets, ignore: globs or 're:' patterns of full module names; a pattern that matches nothing is an error.
    """

    paper: ClassVar[str]
    use_for: ClassVar[str] = ""
    not_for: ClassVar[str] = ""
    after: ClassVar[frozenset[Fact]] = frozenset()
    never_after: ClassVar[frozenset[Fact]] = frozenset()
    makes: ClassVar[frozenset[Fact]] = frozenset()
    prepares: ClassVar[Fact | None] = None
    repeats: ClassVar[str | None] = None

    targets: tuple[str, ...] = Field(
        default=("*",),
        min_length=1,
        description="linears to work on: globs, or regular expressions after 're:'; "
        "leaf names (down_proj); class names (Linear); '*' means those inside the blocks; passes that quantize also "
        "take lm_head and embed_tokens, the output head and the input embedding of any model",
    )
    ignore: tuple[str, ...] = Field(
        default=(), description="linears to skip, in the same forms; lm_head may be listed although '*' leaves it out"
    )

    _patterns = field_validator("targets", "ignore", mode="before")(patterns)

    @classmethod
    def key(cls) -> str:
        """The name in a recipe: the module's file name if the class is called like it, or the lower-case class name."""
        file, title = cls.__module__.rpartition(".")[2], cls.__name__.lower()
        return file if file.replace("_", "") == title else title

    def facts(self) -> frozenset[Fact]:
        """The facts that are true of the layers after the pass, given its options."""
        return self.makes

    @property
    def requires(self) -> Requirements:
        """The needs of the pass."""
        return Requirements(data=True)

    def on_model(self, names: ModuleNames, where: str) -> Self:
        """The pass with patterns that hold for one model: class names become patterns of full names.

        where: the label of the pass. Raises TargetError for targets that name one of two tied ends alone.
        """
        ignore = names.ignored(self.ignore, names.reached(self.targets))
        changed = {"targets": names.targets(self.targets, where), "ignore": ignore}
        return self if changed == {n: getattr(self, n) for n in changed} else self.model_copy(update=changed)

    def choose(self, names: Sequence[str], where: str) -> list[str]:
        """The linears that the pass works on, by full name. names: all linears. where: the label of the pass.

        Raises TargetError for patterns that match nothing.
        """
        return select(names, self.targets, self.ignore, where)

    def for_layer(self, name: str) -> Self | None:
        """The pass with its options for one layer; None when it skips the layer."""
        return self

    def check(self, layer: LayerFacts) -> str | None:
        """The reason why the pass cannot work on a linear, or None. Callers use the pass returned by `for_layer`."""
        after = self.becomes(LayerScheme(layer.shape))
        return next((reason for part in after.parts if (reason := part.refuses(layer.shape)) is not None), None)

    def mismatch(self, layer: LayerFacts, later: Pass) -> str | None:
        """The reason why this pass did not prepare a layer for the later pass that makes `prepares` true, or None."""
        return None

    def zeros(self, shape: tuple[int, int], sparsity: float | None = None) -> Zeros | None:
        """The sparsity due in a layer of this shape, at the pass's sparsity or a given one; None: it does not prune."""
        return None

    @property
    def uneven(self) -> bool:
        """Whether the layers differ in sparsity, so that only their mean, weighted by size, is that of the pass."""
        return False

    def memory(self, size: ProblemSize) -> int:
        """Estimate the peak memory in bytes, without the model, the activations between blocks and the statistics.

        size: of a linear for a layer pass, of a block for a block pass, of the model for a model pass.
        """
        return 0

    def unmet(self, layers: Sequence[LayerScheme], stored: Sequence[LayerScheme], format_: str) -> str | None:
        """The reason why the pass finds nothing to work on in the layers that it meets together, or None.

        layers: their schemes before the pass. stored: the same in the form that the format, by its name, stores.
        """
        return None

    def note(self, format_: Format) -> str | None:
        """What the plan should say about the result of the pass in this format, or None."""
        return None

    def becomes(self, before: LayerScheme) -> LayerScheme:
        """The storage scheme of a layer after this pass, as far as known before the run. before: its scheme now."""
        return before

    def at_most(self, before: LayerScheme) -> LayerScheme:
        """As `becomes`, with the transforms that stay if no earlier layer can absorb them, which only the run finds."""
        return self.becomes(before)

    def sparsities(self, shape: tuple[int, int]) -> list[SparseLayout]:
        """The possible storage schemes of the mask of a layer of this shape; empty if the pass makes no mask."""
        return []

    @property
    def cache(self) -> CacheScheme | None:
        """The rounding of keys and values in the attention modules that contain the targets; None: no rounding."""
        return None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Patterns of layers that match the targets but are skipped."""
        return self.ignore

    @property
    def alternatives(self) -> tuple[Self, ...]:
        """The forms that layers without options of their own may get, if the run decides; a plan checks all of them."""
        return ()

    def survey(self) -> Survey | None:
        """The survey that runs before the first layer is solved. None: no survey."""
        return None

    def settled(self, allocated: Mapping[str, Any]) -> Self:
        """The pass with what its survey decided, by full name; by default the solver gets it, as `Layer.allocated`."""
        return self

    def takes(self, name: str) -> bool:
        """Whether the pass works on a module, by its full name."""
        return chosen(name, self.targets, self.ignore)


class LayerPass(Pass):
    """One weight in, one compressed weight out (GPTQ, Wanda, RTN, ...).

    observes: the statistics of the layer's inputs.
    """

    observes: ClassVar[type[Observer]] = Nothing

    true_sequential: bool = Field(
        default=True, description="calibrate each layer on the output of the compressed layers before it in the block"
    )

    def watches(self) -> Callable[[int, torch.device], Observer] | None:
        """Make a further observer (width, device) of this layer's inputs, which becomes `layer.inputs`. None: none."""
        return None

    @property
    def requires(self) -> Requirements:
        survey = self.survey()
        data = self.observer is not Nothing or (survey is not None and survey.data)
        return Requirements(data=data, reference=issubclass(self.observer, CrossGram))

    @property
    def observer(self) -> type[Observer]:
        """The statistics for these options; by default `observes`."""
        return self.observes

    @property
    def by_rows(self) -> bool:
        """Whether each row of a weight is solved apart, so that several processes may each solve some of the rows."""
        return False

    def memory(self, size: ProblemSize) -> int:
        return COPIES * 4 * size.shape[0] * size.shape[1]

    @abstractmethod
    def solve(self, weight: Float[Tensor, "out in"], seen: Any, layer: Layer) -> Solution:
        """Compress one layer. seen: an instance of `observer`. Pure: it assigns, prints and times nothing."""


class BlockPass(Pass):
    """One block and the inputs that reach it (SmoothQuant, AWQ, channel permutation, ...)."""

    def memory(self, size: ProblemSize) -> int:
        return max(size.forward_bytes, COPIES * 4 * size.largest)

    @abstractmethod
    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        """Rewrite the block in place; every function-preserving rewrite is proved first."""


class ModelPass(Pass):
    """A pass over the whole model: training and global decisions.

    rehearsed: whether a plan runs a pass that requires `new_shape` on random weights, to find the structures that it
    refuses; no, if the data decide what it refuses.
    """

    rehearsed: ClassVar[bool] = True

    def rehearsal(self) -> Self:
        """The pass that a plan rehearses: without work that finds no structures to refuse."""
        return self

    def adapt_objective(self, lm_objective: LMObjective, where: str) -> LMObjective:
        """The model's objective with the options of the pass. where: the label of the pass.

        It is also called before the run. Raises RecipeError for options that have no effect on this objective, and for
        a pass that needs a loss on the text where there is none.
        """
        check_learns(lm_objective, where, "leave the pass out, or choose options that need no loss")
        return lm_objective

    def check_teacher(self, model: PreTrainedModel, teacher: PreTrainedModel, where: str) -> None:
        """Raise ModelError if the pass cannot use this teacher; called before the run. where: the label of the pass.

        The weights of both may be on the meta device. The vocabularies are equal.
        """
        return

    def outcome(self, model: PreTrainedModel, where: str) -> PretrainedConfig:
        """The configuration of the model after the pass, for passes that require `new_shape`. where: its label.

        It reads no weights; they may be on the meta device. Raises TargetError, beginning with `where`, for an
        impossible shape; ModelError if no configuration describes the shape.
        """
        return model.config

    @abstractmethod
    def apply(self, model: nn.Module, run: Run) -> None:
        """Change the model in place; all weights are in memory."""


Step = tuple[str, Pass, list[str]]
"""(label, pass, full names of the linears that the pass works on)."""

ERROR_TOKENS = 128
"""Of one sequence, if no pass calibrates: enough for the errors of layers, of which few rows are sampled."""


def calibrates(steps: Sequence[Step]) -> bool:
    """Whether one of the passes calibrates; else a part of one sequence is enough, to measure the errors of layers."""
    return any(step.requires.data for _, step, _ in steps)


def measured_tokens(steps: Sequence[Step], length: int) -> int:
    """The tokens of a calibration sequence that a run reads. length: of the sequence."""
    return length if calibrates(steps) else min(length, ERROR_TOKENS)
