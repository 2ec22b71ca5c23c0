"""Bits within a budget: every layer gets one of several grids, by what rounding it costs the model.

The value of `allocate` of a quantizing pass. What a choice costs in a layer is estimated before the sweep, from the
error of rounding to nearest. The sum of the costs is made least within the budget, by an integer program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from compress.errors import TargetError, UserError
from compress.layers.scheme import LayerScheme
from compress.models.kinds.batch import Batch
from compress.models.structure.select import ModuleNames
from compress.numerics.budget import within_budget
from compress.numerics.linalg import Regularization
from compress.numerics.quant.grids import GRIDS, Grid, IntGrid
from compress.passes.contract.context import Run
from compress.passes.contract.layers import Surveyed
from compress.passes.contract.limits import size_of
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, Nothing
from compress.passes.contract.options import DENSE, OptionError, Options, Override, read_overrides
from compress.passes.contract.passes import AnyPass, SizeTarget, StoredBytes, Survey, works_on
from compress.train.curvature import hessian_traces, weight_curvature

if TYPE_CHECKING:
    from compress.passes.families.quantizing import Quantizing

    StoredBits = Callable[[Quantizing, tuple[int, int]], float]
    """The bits per weight that a pass stores for a layer (out, in)."""

PLAIN_GROUP = 32
"""The group size of `fallback`."""
SEED = 0
FOLLOWING = ("weights", "group_size", "symmetric", "scale")
"""Options that follow from the grid, so that every choice states them."""
WIDTHS = (2, 3, 4, 8)
"""Bits of the integers that layers choose from, if no choices are given."""


class Choice(BaseModel):
    """Options that a layer may get; all others are those of the pass."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The options of the pass that change."""
        return dict(self.model_extra or {})


class Bits(Options):
    """Bits per weight of all layers of a pass, and how they are divided."""

    @classmethod
    def key(cls) -> str:
        return "allocate"

    bits: float | None = Field(
        default=None,
        gt=0,
        le=32,
        description="stored per weight on average at most, with zero points and scales of 16 bits; of the layers that "
        "no override names",
    )
    size: str | int | None = Field(
        default=None,
        description="instead of bits: the size at most of the complete checkpoint as the format stores it, such as "
        "90MB; with embedding, head and other tensors, and for gguf all of the file",
    )
    by: Literal["kl", "hawq", "sensitivity"] = Field(
        default="kl",
        description="cost of an error in a layer: 'kl': the KL divergence from the model, to second order, from the "
        "Fisher information of every weight; 'hawq': mean diagonal of the Hessian of a layer times the squared error "
        "of its weight; 'sensitivity': the squared relative error of its output, which needs one block in memory only",
    )
    choices: tuple[Choice, ...] | None = Field(
        default=None,
        min_length=2,
        description="options that layers choose from, such as [{weights: int3}, {weights: int4, group_size: 32}]; "
        "default: the integers of 2, 3, 4 and 8 bits next to the budget, in the groups of the pass",
    )
    least: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="with size: leave out choices with fewer bits than this share of the budget; the cost of large "
        "errors is estimated too low",
    )
    sequences: int = Field(default=32, gt=0, description="for kl and hawq: calibration sequences, the first ones")
    probes: int = Field(default=4, gt=0, description="for hawq: random vectors per sequence of Hutchinson's estimate")

    def without_effect(self) -> dict[str, str]:
        idle = {"kl": ("probes",), "sensitivity": ("probes", "sequences")}.get(self.by, ())
        unsized = {} if self.size is not None else {"least": "without size; leave it out"}
        return super().without_effect() | dict.fromkeys(idle, f"by: {self.by}; leave it out") | unsized

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (self.bits is None) == (self.size is None):
            raise ValueError("write either bits, such as {bits: 3.5}, or size, such as {size: 90MB}")
        if self.size is not None:
            try:
                size_of(self.size, "size")
            except UserError as error:
                raise ValueError(str(error)) from error

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """Read a number as that of bits, and a text as a size."""
        if isinstance(value, str):
            return {"size": value}
        return {"bits": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    def choices_for(self, grid: Grid) -> tuple[Choice, ...]:
        """Return the given choices, or the default ones.

        Raises:
            ValueError: for a grid without default ones.
        """
        if self.choices is not None:
            return self.choices
        if not isinstance(grid, IntGrid):
            example = f"[{{weights: {grid.name}}}, {{weights: ...}}]"
            raise ValueError(f"allocate: grid {grid.name} has no other widths; write choices: {example}")
        return tuple(Choice.model_validate({"weights": f"int{width}"}) for width in WIDTHS)


@dataclass(frozen=True)
class Costs:
    """The figures of one layer.

    Attributes:
        together: a name that is common to layers that must be stored alike.
        weights: their number.
        options: for every choice the stored bits and the cost.
        choices: the choices as they hold for this layer, with the fallbacks of its width.
    """

    together: str
    weights: int
    options: tuple[tuple[float, float], ...]
    choices: tuple[Choice, ...]


def remaining(statistics: Gram) -> float:
    """Return the share of the error of rounding to nearest that is left of a layer's output when GPTQ compensates it.

    Rounding errors d that do not depend on the inputs give tr(H) d^2 to nearest, and sum_j d^2 / U_jj^2 in the sweep of
    GPTQ, with H regularized and U as in `Gram.factor` (Frantar 2022, step 3). It is 1 for inputs without correlations.
    """
    diagonal = statistics.diagonal
    factor = statistics.factor(Regularization(), diagonal.argsort(descending=True, stable=True))[0].diagonal()
    return float(factor.double().square().reciprocal().sum() / diagonal.double().sum().clamp(min=1e-30))


class BitSurvey(Survey):
    """What every choice costs in every layer, and the choices within the budget."""

    def __init__(self, step: Quantizing, options: Bits) -> None:
        self.options, self.choices = options, options.choices_for(step.grid)
        self.step, self.steps = step, step.with_choices(self.choices)
        self.observer = step.compensates or (Gram if options.by == "sensitivity" else Nothing)
        self.curvature: dict[str, Tensor] = {}
        self.traces: dict[str, float] = {}

    @property
    def whole(self) -> bool:
        return self.options.by != "sensitivity"

    def memory(self, size: ProblemSize) -> int:
        # what a forward pass keeps for the derivatives, and the logits with theirs
        activations = 2 * size.itemsize * size.length * size.passed + 4 * 4 * size.length * size.vocabulary
        return activations + 4 * size.weights if self.options.by == "kl" else 3 * activations + 4 * 4 * size.weights

    def prepare(self, model: nn.Module, names: Sequence[str], batches: Sequence[Batch], run: Run) -> None:
        processes, mine = run.processes, [name for name in names if divides(self.step, name)]
        rows = [row for batch in batches for row in batch.split()]
        rows = rows[: -(-self.options.sequences // processes.size)]
        message = f"derivatives of the model, by: {self.options.by}"

        def tell(sequences_done: int) -> None:
            run.journal.add("progress", run.label or "allocate", message, done=sequences_done, of=len(rows))

        if self.options.by == "kl":
            curvature, places = weight_curvature(model, mine, rows, SEED, tell)
            places = sum(processes.gather(places))
            self.curvature = {name: processes.sum(squares) / places for name, squares in curvature.items()}
        else:
            traces, places = hessian_traces(model, mine, rows, self.options.probes, SEED, tell)
            places = sum(processes.gather(places))
            traces_by_process = processes.gather(traces)
            self.traces = {
                name: sum(partial_traces[name] for partial_traces in traces_by_process) / places for name in traces
            }

    def collect(self, block: Sequence[Surveyed]) -> Mapping[str, Costs]:
        return {
            surveyed.layer.name: self._costs(surveyed) for surveyed in block if divides(self.step, surveyed.layer.name)
        }

    def _costs(self, surveyed: Surveyed) -> Costs:
        weight, options = surveyed.weight, []
        error_share = 1.0 if self.step.compensates is None else remaining(surveyed.statistics)
        steps = self.alternatives(surveyed.module.shape)
        for step in steps:
            wrong = step.nearest(weight, surveyed.layer).dense() - weight
            bits = self._stored_bits(step, surveyed)
            options.append((bits, error_share * self._cost(surveyed, wrong)))
        choices = tuple(_stated(step, self.choices[0]) for step in steps)
        return Costs(surveyed.together, weight.numel(), tuple(options), choices)

    def _stored_bits(self, step: Quantizing, surveyed: Surveyed) -> float:
        """Return the bits of a layer: those of `bits_per_weight`, or those of the format for a size."""
        shape = surveyed.module.shape
        if self.options.size is None or surveyed.stored_bytes is None:
            return bits_per_weight(step, shape) * shape[0] * shape[1]
        return 8 * surveyed.stored_bytes(step.effects(LayerScheme(shape)).scheme)

    def _cost(self, surveyed: Surveyed, difference: Float[Tensor, "out in"]) -> float:
        name, criterion = surveyed.layer.name, self.options.by
        if criterion == "kl":  # 1/2 sum_oi F_oi E_oi^2, F the diagonal of the Fisher information
            return float((self.curvature[name].to(difference) * difference.square()).sum(dtype=torch.float64)) / 2
        if criterion == "hawq":  # Omega of HAWQ-V2: mean diagonal of the Hessian times the squared error
            mean = max(self.traces[name], 0) / difference.numel()  # negative only by chance, or far from an optimum
            return mean * float(difference.square().sum(dtype=torch.float64)) / 2
        outputs = [float(((w @ surveyed.statistics.hessian) * w).sum()) for w in (difference, surveyed.weight)]
        return outputs[0] / max(outputs[1], 1e-30)

    def allocate(self, figures: Mapping[str, Costs]) -> Mapping[str, Choice]:
        items: dict[str, dict[str, tuple[float, float]]] = {}
        for costs in figures.values():
            totals = items.setdefault(costs.together, {str(i): (0.0, 0.0) for i in range(len(self.choices))})
            for i, (bits, cost) in enumerate(costs.options):
                totals[str(i)] = totals[str(i)][0] + bits, totals[str(i)][1] + cost
        assert self.options.bits is not None, "a size is resolved on the model before the run"
        budget = self.options.bits * sum(costs.weights for costs in figures.values())
        try:
            chosen = within_budget(items, budget)
        except ValueError as error:
            raise TargetError(f"allocate: bits {self.options.bits:g}: {error}") from error
        return {name: costs.choices[int(chosen[costs.together])] for name, costs in figures.items()}

    def alternatives(self, shape: tuple[int, int]) -> tuple[Quantizing, ...]:
        return tuple(fitting(step, [shape]) for step in self.steps)

    def settled(self, step: AnyPass, allocated: Mapping[str, Choice]) -> AnyPass:
        overrides = list(self.step.overrides)
        choices: list[Choice] = []
        for choice in allocated.values():
            choices += [] if choice in choices else [choice]
        for choice in choices:
            names = tuple(name for name, chosen in allocated.items() if chosen == choice)
            if names:
                overrides.append(Override.model_validate({"targets": names, **choice.options}))
        return step.model_copy(update={"overrides": tuple(overrides), "allocate": None})

    def note(self, allocated: Mapping[str, Choice]) -> str:
        names = [
            name for name in self.choices[0].options if len({option.options.get(name) for option in self.choices}) > 1
        ]
        texts = [
            ", ".join(f"{choice.options[n]}" if n == "weights" else f"{n} {choice.options[n]}" for n in names)
            for choice in allocated.values()
        ]
        return "layers by choice: " + "; ".join(f"{text}: {count}" for text, count in Counter(texts).most_common())


def check_choices(step: Quantizing, allocate: Bits) -> None:
    """Raise OptionError for choices that are no options of the pass, skip layers, or are equal."""
    kind, choices = type(step), allocate.choices_for(step.grid)
    base = {name: getattr(step, name) for name in kind.model_fields if name not in ("overrides", "allocate")}
    spelled = [{"targets": "*", **choice.options} for choice in choices]
    read_overrides(kind, base, spelled, ("allocate", "choices"))
    if any(choice.options.get("weights") == DENSE for choice in choices):
        raise OptionError(("allocate", "choices"), "weights: none is no choice; name such layers in overrides")
    grids = [choice.options.get("weights", step.weights) for choice in choices]
    if allocate.size is None and (runs := [name for name in grids if name in GRIDS and GRIDS[name].run > 1]):
        problem = f"{runs[0]} is no choice: the budget counts a code for each weight, and a GGUF file has fewer bits"
        raise OptionError(("allocate", "choices"), f"{problem}; write size instead of bits")
    if len({repr(sorted(choice.options.items())) for choice in choices}) < len(choices):
        raise OptionError(("allocate", "choices"), "two of them are equal")


def stated_options(allocate: Bits, grid: Grid) -> list[str]:
    """Return the options that all choices state, in alphabetical order; those of the pass have no effect."""
    return sorted(set.intersection(*[set(choice.options) for choice in allocate.choices_for(grid)]))


def divides(step: Quantizing, name: str) -> bool:
    """Return whether the budget of a pass is for this layer: no override names it."""
    return not any(override.takes(name) for override in step.overrides)


def bits_per_weight(step: Quantizing, shape: tuple[int, int]) -> float:
    """Return the bits per weight that a pass stores for a layer (out, in), with scales of 16 bits."""
    scheme = step.effects(LayerScheme(shape)).scheme
    return 8 * scheme.size_bytes(torch.float16) / (shape[0] * shape[1])


def budget_on_model(step: Quantizing, names: ModuleNames, label: str) -> dict[str, Any]:
    """Return the changed options of a pass on a model: of the largest choice within the budget, until the run decides.

    Args:
        label: the label of the pass, for errors.

    Raises:
        TargetError: if overrides name all layers, or for an impossible budget.
    """
    assert step.allocate is not None
    inside = [name for name in names.linears if works_on(step, name) and divides(step, name)]
    if not inside:
        raise TargetError(f"{label} allocate: overrides name all of its layers; leave allocate out")
    shapes = {name: names.shapes[name] for name in inside}
    if step.allocate.size is not None:
        smallest = min(_uniform(step, step.allocate, shapes), key=lambda own: _mean_bits(own, shapes, bits_per_weight))
        return {name: getattr(smallest, name) for name in FOLLOWING}
    try:
        return _start(step, shapes, step.allocate, bits_per_weight)
    except ValueError as error:
        raise TargetError(f"{label} allocate: {error}") from error


class BitsTarget(SizeTarget):
    """The size of the checkpoint as the budget of a quantizing pass.

    Args:
        step: the pass, on a model.
        allocate: its budget, a size.
    """

    def __init__(self, step: Quantizing, allocate: Bits) -> None:
        assert allocate.size is not None
        self._step, self._allocate, self.size = step, allocate, allocate.size

    def divides(self, name: str) -> bool:
        return divides(self._step, name)

    def limits(self, shapes: Mapping[str, tuple[int, int]], stored_bytes: StoredBytes) -> tuple[float, float]:
        steps = self._step.with_choices(self._allocate.choices_for(self._step.grid))
        sizes = [
            [stored_bytes(fitting(own, [shape]).effects(LayerScheme(shape)).scheme) for own in steps]
            for shape in shapes.values()
        ]
        return sum(map(min, sizes)), sum(map(max, sizes))

    def within(
        self, shapes: Mapping[str, tuple[int, int]], layer_bytes: float, stored_bytes: StoredBytes
    ) -> Quantizing:
        def stored_bits(own: Quantizing, shape: tuple[int, int]) -> float:
            return 8 * stored_bytes(own.effects(LayerScheme(shape)).scheme) / (shape[0] * shape[1])

        bits = 8 * layer_bytes / sum(rows * width for rows, width in shapes.values())
        allocate = self._allocate.model_copy(update={"bits": bits})
        if allocate.choices is not None:
            means = [_mean_bits(own, shapes, stored_bits) for own in _uniform(self._step, allocate, shapes)]
            pairs = zip(allocate.choices, means, strict=True)
            enough = tuple(choice for choice, mean in pairs if mean >= allocate.least * bits)
            fewer = allocate.model_copy(update={"choices": enough})
            if enough and BitsTarget(self._step, fewer).limits(shapes, stored_bytes)[0] <= layer_bytes:
                allocate = fewer
        return self._step.model_copy(update=_start(self._step, shapes, allocate, stored_bits))


def fitting(step: Quantizing, shapes: Iterable[tuple[int, int]]) -> Quantizing:
    """Return a pass for layers of these shapes: with its fallback, if its super-blocks do not divide all widths."""
    block = step.grid.block
    if step.fallback is None or all(width % block == 0 for _, width in shapes):
        return step
    return step.with_override(
        Override.model_validate({"targets": ("*",), "weights": step.fallback, "group_size": PLAIN_GROUP})
    )


def _stated(step: Quantizing, choice: Choice) -> Choice:
    """Return a choice with the values that its options have in a pass."""
    return Choice.model_validate({name: getattr(step, name) for name in choice.options})


def _uniform(step: Quantizing, allocate: Bits, shapes: Mapping[str, tuple[int, int]]) -> list[Quantizing]:
    """Return the pass with each choice, in a form that is possible for all layers."""
    return [fitting(own, shapes.values()) for own in step.with_choices(allocate.choices_for(step.grid))]


def _mean_bits(step: Quantizing, shapes: Mapping[str, tuple[int, int]], stored_bits: StoredBits) -> float:
    """Return the bits per weight of a pass over all layers."""
    total = sum(rows * width for rows, width in shapes.values())
    return sum(stored_bits(step, shape) * shape[0] * shape[1] for shape in shapes.values()) / total


def _start(
    step: Quantizing, shapes: Mapping[str, tuple[int, int]], allocate: Bits, stored_bits: StoredBits
) -> dict[str, Any]:
    """Return the options of one choice for all layers, and all choices complete.

    Raises:
        ValueError: for an impossible budget.
    """
    assert allocate.bits is not None
    choices = allocate.choices_for(step.grid)
    steps, uniform = step.with_choices(choices), _uniform(step, allocate, shapes)
    sizes = [_mean_bits(own, shapes, stored_bits) for own in uniform]
    fitting_ones = [i for i, size in enumerate(sizes) if size <= allocate.bits]
    if allocate.size is None and not min(sizes) <= allocate.bits <= max(sizes):
        reached = f"the choices reach {min(sizes):.4g} to {max(sizes):.4g} bits per weight"
        raise ValueError(f"bits {allocate.bits:g}: {reached}")
    largest = uniform[max(fitting_ones or [sizes.index(min(sizes))], key=lambda i: sizes[i])]
    if allocate.choices is None:  # the costs of far larger errors are too low: they are of second order
        start = (fitting_ones or [0])[-1]
        choices, steps = choices[start : start + 2], steps[start : start + 2]
    changed = dict.fromkeys((*FOLLOWING, *(name for choice in choices for name in choice.options)))
    complete = tuple(Choice.model_validate({name: getattr(step, name) for name in changed}) for step in steps)
    values = {name: getattr(largest, name) for name in changed}
    return {**values, "allocate": allocate.model_copy(update={"choices": complete})}
