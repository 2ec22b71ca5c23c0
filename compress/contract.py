"""The contract: a pass is its configuration, a frozen value with one verb, in one of three sizes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import torch
from jaxtyping import Bool, Float
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from torch import Tensor, nn

from compress.model.links import Group
from compress.numerics.codes import Codes, GroupSize, ScaleSearch
from compress.numerics.grids import GRIDS, Grid, IntGrid
from compress.numerics.masks import Pattern
from compress.stream.observers import Nothing, Observer
from compress.types import Fact, Note

if TYPE_CHECKING:
    from compress.context import Run


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

    @field_validator("targets", "ignore", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        """One pattern may be written without a list; regular expressions must compile."""
        patterns = (value,) if isinstance(value, str) else value
        for pattern in patterns if isinstance(patterns, (list, tuple)) else ():
            if isinstance(pattern, str) and pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return patterns

    @classmethod
    def key(cls) -> str:
        """The name in a recipe, which is the name of the file; a class of one's own elsewhere is called by its name."""
        package, _, file = cls.__module__.rpartition(".")
        return file if package.endswith(".passes") else cls.__name__.lower()

    def facts(self) -> frozenset[Fact]:
        """What this pass makes of the model, its options considered."""
        return self.makes


@dataclass(frozen=True)
class Layer:
    """What a solver may know of the layer besides its weight and inputs.

    name: full module name. mask: True where weights are kept, or None. storage: the dtype that scales are stored in.
    note: note(kind, message, **figures) writes to the journal.
    """

    name: str
    mask: Bool[Tensor, "out in"] | None
    storage: torch.dtype
    note: Note


@dataclass(frozen=True)
class Solution:
    """What becomes of a layer: a dense weight or codes, a mask (None: as before), a grid for its inputs."""

    weight: Float[Tensor, "out in"] | Codes
    mask: Bool[Tensor, "out in"] | None = None
    activations: Grid | None = None


class LayerPass(Pass):
    """One weight in, one compressed weight out (GPTQ, Wanda, RTN, ...).

    observes: what to gather from the layer's inputs.
    """

    observes: ClassVar[type[Observer]] = Nothing

    true_sequential: bool = Field(
        default=True, description="calibrate each layer on the output of the compressed layers before it in the block"
    )

    @abstractmethod
    def solve(self, weight: Float[Tensor, "out in"], seen: Any, layer: Layer) -> Solution:
        """The compressed layer; `seen` is an instance of `observes`. Pure: nothing is assigned, printed or timed."""


class BlockInputs(Protocol):
    """What reaches a block, as a block pass sees it."""

    groups: list[Group]
    """Groups of the block's linears that the pass is to work on, in the order of execution."""

    def observe(self, observer: type[Observer]) -> dict[Group, Any]:
        """Forward all calibration inputs once; what an observer gathers at the input of each group."""
        ...

    def probe(self, block: nn.Module) -> Tensor:
        """The block's output (or a copy's) on one short fixed input, for proofs."""
        ...


class BlockPass(Pass):
    """One block and the inputs that reach it (SmoothQuant, AWQ, channel permutation, ...)."""

    @abstractmethod
    def solve_block(self, block: nn.Module, inputs: BlockInputs, note: Note) -> None:
        """Rewrite the block in place; every function-preserving rewrite proves itself first."""


class ModelPass(Pass):
    """The whole model: training and global decisions."""

    @abstractmethod
    def apply(self, model: nn.Module, run: Run) -> None:
        """Change the model in place; all of it is in memory."""


def _grid(value: Any) -> Any:
    """A grid by its name."""
    if isinstance(value, Grid):
        return value.name
    if not isinstance(value, str) or value not in GRIDS:
        raise ValueError(f"grid {value!r} is not known; known: {', '.join(GRIDS)}")
    return value


GridName = Annotated[str, BeforeValidator(_grid)]


def _group_size(value: Any) -> Any:
    if isinstance(value, bool) or not (value in ("channel", "tensor") or (isinstance(value, int) and value > 0)):
        raise ValueError(f"group_size {value!r} must be a positive number of columns, channel, or tensor")
    return value


@dataclass(frozen=True)
class WeightSpec:
    """How a quantizing pass will store a weight; what a format must be able to hold.

    indexed: groups are not contiguous (a group index per column is stored). activations: grid of the inputs.
    """

    grid: Grid
    group_size: GroupSize
    symmetric: bool
    indexed: bool
    activations: Grid | None


class QuantizingPass(LayerPass):
    """Options that every quantizing pass has, under the same names."""

    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    weights: GridName = Field(
        default="int4", description="number grid of the weights: int2..int8, fp8_e4m3, fp4_e2m1, nf4, ..."
    )
    group_size: Annotated[GroupSize, BeforeValidator(_group_size)] = Field(
        default=64, description="columns that share a scale; 'channel': a whole row, 'tensor': the whole matrix"
    )
    symmetric: bool = Field(default=True, description="no zero point; false adds one per scale (integer grids)")
    scale: ScaleSearch = Field(
        default="absmax", description="'absmax' covers the range; 'mse' clips it where rounding error is least"
    )
    activations: Literal["none", "int8", "fp8_e4m3"] = Field(
        default="none", description="grid that inputs are rounded to when the model runs, one scale per token"
    )

    @property
    def grid(self) -> Grid:
        """The grid of the weights."""
        return GRIDS[self.weights]

    @property
    def spec(self) -> WeightSpec:
        """What a format must hold."""
        return WeightSpec(self.grid, self.group_size, self.symmetric, self.indexed, self.input_grid)

    @property
    def indexed(self) -> bool:
        """Whether groups of columns are not contiguous."""
        return False

    @property
    def input_grid(self) -> Grid | None:
        """The grid of the inputs."""
        return None if self.activations == "none" else GRIDS[self.activations]

    def facts(self) -> frozenset[Fact]:
        inputs: frozenset[Fact] = frozenset({"activations_quantized"}) if self.input_grid else frozenset()
        return self.makes | inputs

    def model_post_init(self, context: Any) -> None:
        if not self.symmetric and not isinstance(self.grid, IntGrid):
            raise ValueError(f"symmetric: false needs an integer grid; {self.weights} has no zero point")

    def solve(self, weight: Float[Tensor, "out in"], seen: Any, layer: Layer) -> Solution:
        return Solution(self.codes(weight, seen, layer), activations=self.input_grid)

    @abstractmethod
    def codes(self, weight: Float[Tensor, "out in"], seen: Any, layer: Layer) -> Codes:
        """The weight in codes; weights outside of layer.mask must decode to exactly zero."""


class PruningPass(LayerPass):
    """Options that every pruning pass has, under the same names."""

    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"masked"})

    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of weights to remove; 0.5 if not given; N:M patterns have their own",
    )
    pattern: Pattern = Field(
        default=Pattern("row"), description="where zeros may stand: 'row', 'layer', or 'N:M' such as '2:4'"
    )
    allocate: Literal["uniform"] = Field(default="uniform", description="how sparsity is shared out over layers")

    def model_post_init(self, context: Any) -> None:
        if self.pattern.n_of_m is not None and self.sparsity is not None:
            n, m = self.pattern.n_of_m
            if abs(self.sparsity - (1 - n / m)) > 1e-9:
                raise ValueError(f"pattern {self.pattern.text} has sparsity {1 - n / m:g}; leave sparsity out")

    @property
    def density(self) -> float:
        """The share of weights that is kept."""
        if self.pattern.n_of_m is not None:
            return self.pattern.n_of_m[0] / self.pattern.n_of_m[1]
        return 1 - (0.5 if self.sparsity is None else self.sparsity)

    def solve(self, weight: Float[Tensor, "out in"], seen: Any, layer: Layer) -> Solution:
        score = self.score(weight, seen)
        if layer.mask is not None:
            score = score.masked_fill(~layer.mask, -1)  # what is pruned already goes first
        keep = self.pattern.keep(score, self.density)
        keep = keep if layer.mask is None else keep & layer.mask
        return Solution(weight * keep, keep)

    @abstractmethod
    def score(self, weight: Float[Tensor, "out in"], seen: Any) -> Float[Tensor, "out in"]:
        """How much each weight matters, at least 0; the least are removed."""
