"""The contract: a pass is its configuration, a frozen value with one verb, in one of three sizes.

The verb is `LayerPass.solve`, `BlockPass.solve_block` or `ModelPass.apply`. What a pass needs and what it does are
values (`Requirements`, `Effects`). All other methods have defaults, which most passes keep:

    every pass     requires         needs of the pass: data, a teacher, the uncompressed model, ... (`Requirements`)
                   effects          what the pass does to a layer, as far as known before the run (`Effects`)
                   on_model         the pass with its patterns in terms of the model's names
                   for_layer        the pass with the options of one layer
                   memory           estimate of the peak memory
                   work             operations of solving a layer, for a prediction of the time
                   survey           statistics of all layers, collected before the first one is solved (`Survey`)
    LayerPass      observer         statistics of inputs that several layers share
    ModelPass      adapt_objective  the language-model objective with the options of the pass
                   outcome          the configuration of the model after the pass
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import Self

from compress.layers.scheme import LayerScheme
from compress.models.kinds.batch import Batch
from compress.models.kinds.contract import ModelKind
from compress.models.kinds.headless import check_learns
from compress.models.structure.patterns import chosen, select
from compress.models.structure.select import ModuleNames
from compress.passes.contract.facts import Effects, Fact, Log, Requirements
from compress.passes.contract.layers import BlockInputs, Layer, Solution, Surveyed
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import CrossGram, Nothing, Observer
from compress.passes.contract.options import Options, patterns

if TYPE_CHECKING:
    from compress.passes.contract.context import Run

COPIES = 4  # of a weight in float32: the original, the result, and two intermediate ones

AnyPass = TypeVar("AnyPass", bound="Pass")

ActivationScale = Literal["token", "group", "static"]


class Survey(ABC):
    """A walk over all layers of a pass, block by block, before the sweep solves the first one (original model).

    Attributes:
        observer: statistics of the inputs of every layer; `Nothing`: the blocks are not run.
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

    def alternatives(self, shape: tuple[int, int]) -> tuple[Pass, ...]:
        """Return the passes that layers of a shape without options of their own may get; a plan checks all of them."""
        return ()

    def memory(self, size: ProblemSize) -> int:
        """Estimate the peak memory of `prepare` in bytes, without the model."""
        return 0

    def prepare(self, model: nn.Module, names: Sequence[str], batches: Sequence[Batch], run: Run) -> None:
        """Read what is needed of the whole model; called before the walk if `whole`.

        Args:
            names: full names of the linears.
            batches: calibration batches of this process.
        """
        return

    @abstractmethod
    def collect(self, block: Sequence[Surveyed]) -> Mapping[str, Any]:
        """Return the figures of the layers of a block, by full name."""

    @abstractmethod
    def allocate(self, figures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the value of `Layer.allocated` for every layer, by full name.

        Args:
            figures: the collected figures of all layers, by full name.
        """

    def settled(self, step: AnyPass, allocated: Mapping[str, Any]) -> AnyPass:
        """Return the pass with the allocated options; by default the solver gets them, as `Layer.allocated`."""
        return step

    def note(self, allocated: Mapping[str, Any]) -> str | None:
        """Return a sentence on the allocation for the journal, or None."""
        return None


StoredBytes = Callable[[LayerScheme], int]
"""The bytes that the format of the checkpoint takes for a layer of a scheme."""


class SizeTarget(ABC):
    """A pass whose budget is the size of the checkpoint, which is known on the model only.

    Attributes:
        size: as the recipe states it, such as '90MB' or a number of bytes.
    """

    size: str | int

    @abstractmethod
    def divides(self, name: str) -> bool:
        """Return whether a layer of the pass shares the size."""

    @abstractmethod
    def limits(self, shapes: Mapping[str, tuple[int, int]], stored_bytes: StoredBytes) -> tuple[float, float]:
        """Return the smallest and the largest bytes of the layers that share the size.

        Args:
            shapes: of these layers.
            stored_bytes: counts the bytes of a layer.
        """

    @abstractmethod
    def within(self, shapes: Mapping[str, tuple[int, int]], layer_bytes: float, stored_bytes: StoredBytes) -> Pass:
        """Return the pass with a budget in place of the size.

        Args:
            shapes: of the layers that share the size.
            layer_bytes: what is left for these layers.
            stored_bytes: counts the bytes of a layer.
        """


class SizedPass:
    """An optional second base of a pass whose budget may be the size of the checkpoint."""

    @property
    def size_target(self) -> SizeTarget | None:
        """The size of the checkpoint that the pass divides among its layers; None: it has no such budget."""
        return None


class Pass(Options, ABC):
    """One step of a recipe. A pass IS its configuration: a frozen value with one verb.

    Attributes:
        paper: URL of the publication, if there is one.
        use_for: what the pass is good for, for its page in the documentation.
        not_for: where something else is better, for the same page.
        after: facts that must be true of the model before the pass.
        never_after: facts that must be false before the pass.
        makes: facts that are true of its layers after the pass.
        repeats: name of the option that sets how many equal steps the pass takes, for a prediction of its time; None:
            it takes none.
        targets: globs or 're:' patterns of full module names; a pattern that matches nothing is an error.
        ignore: patterns of modules to skip.
    """

    paper: ClassVar[str] = ""
    use_for: ClassVar[str] = ""
    not_for: ClassVar[str] = ""
    after: ClassVar[frozenset[Fact]] = frozenset()
    never_after: ClassVar[frozenset[Fact]] = frozenset()
    makes: ClassVar[frozenset[Fact]] = frozenset()
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

    @property
    def requires(self) -> Requirements:
        """The needs of the pass."""
        return Requirements(data=True)

    def effects(self, layer: LayerScheme) -> Effects:
        """Return what the pass does to a layer, as far as known before the run.

        Callers use the pass returned by `for_layer`, and `ANY_LAYER` for effects that do not depend on the layer.

        Args:
            layer: the storage scheme of the layer before the pass.
        """
        return Effects(layer, facts=self.makes, skipped=self.ignore)

    def on_model(self, names: ModuleNames, label: str) -> Self:
        """Return the pass with patterns that hold for one model: class names become patterns of full names.

        Args:
            label: the label of the pass, for errors.

        Raises:
            TargetError: if targets name one of two tied modules alone.
        """
        ignore = names.ignored(self.ignore, names.reached(self.targets))
        changed = {"targets": names.targets(self.targets, label), "ignore": ignore}
        return self if changed == {n: getattr(self, n) for n in changed} else self.model_copy(update=changed)

    def for_layer(self, name: str) -> Self | None:
        """Return the pass with its options for one layer; None if it skips the layer."""
        return self

    def memory(self, size: ProblemSize) -> int:
        """Estimate the peak memory in bytes, without the model, the activations between blocks and the statistics.

        Args:
            size: of a linear for a layer pass, of a block for a block pass, of the model for a model pass.
        """
        return 0

    def survey(self) -> Survey | None:
        """Return the survey that runs before the first layer is solved. None: no survey."""
        return None


def works_on(step: Pass, name: str) -> bool:
    """Return whether a pass works on a linear, by its full name."""
    return chosen(name, step.targets, step.ignore) and step.for_layer(name) is not None


def chosen_linears(step: Pass, names: Sequence[str], label: str) -> list[str]:
    """Return the full names of the linears that a pass works on.

    Args:
        names: all linears.
        label: the label of the pass, for errors.

    Raises:
        TargetError: if a pattern matches nothing.
    """
    return [name for name in select(names, step.targets, step.ignore, label) if step.for_layer(name) is not None]


class LayerPass(Pass):
    """One weight in, one compressed weight out (GPTQ, Wanda, RTN, ...).

    Attributes:
        observes: statistics of the layer's inputs.
        true_sequential: calibrate on the output of compressed layers.
    """

    observes: ClassVar[type[Observer]] = Nothing

    true_sequential: bool = Field(
        default=True, description="calibrate each layer on the output of the compressed layers before it in the block"
    )

    @property
    def requires(self) -> Requirements:
        survey = self.survey()
        data = self.observer is not Nothing or (survey is not None and survey.data)
        return Requirements(data=data, reference=issubclass(self.observer, CrossGram))

    @property
    def observer(self) -> type[Observer]:
        """The statistics for these options; by default `observes`."""
        return self.observes

    def memory(self, size: ProblemSize) -> int:
        return COPIES * 4 * size.shape[0] * size.shape[1]

    @abstractmethod
    def solve(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer) -> Solution:
        """Compress one layer.

        Args:
            statistics: an instance of `observer`. Pure: it assigns, prints and times nothing.
        """


class BlockPass(Pass):
    """One block and the inputs that reach it (SmoothQuant, AWQ, channel permutation, ...)."""

    def memory(self, size: ProblemSize) -> int:
        return max(size.forward_bytes, COPIES * 4 * size.largest)

    @abstractmethod
    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        """Rewrite the block in place; every function-preserving rewrite is proved first."""


class ModelPass(Pass):
    """A pass over the whole model: training and global decisions."""

    def adapt_objective(self, lm_objective: ModelKind, label: str) -> ModelKind:
        """Return the model's objective with the options of the pass. It is also called before the run.

        Args:
            label: the label of the pass, for errors.

        Raises:
            RecipeError: for options that have no effect on this objective, and for a pass that needs a loss on the
                text where there is none.
        """
        check_learns(lm_objective, label, "leave the pass out, or choose options that need no loss")
        return lm_objective

    def outcome(self, model: PreTrainedModel, label: str) -> PretrainedConfig:
        """Return the configuration of the model after the pass, for passes that require `new_shape`.

        It reads no weights; they may be on the meta device.

        Args:
            label: the label of the pass, with which errors begin.

        Raises:
            TargetError: for an impossible shape.
            ModelError: if no configuration describes the shape.
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
    """Return the tokens of a calibration sequence that a run reads.

    Args:
        length: of the sequence.
    """
    return length if calibrates(steps) else min(length, ERROR_TOKENS)
