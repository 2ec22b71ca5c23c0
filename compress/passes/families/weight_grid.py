"""The options of the weights' number grid, for passes that quantize and passes that prepare quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from compress.numerics.quant.codes import GroupSize
from compress.numerics.quant.grids import GRIDS, Grid
from compress.passes.contract.facts import Effects
from compress.passes.contract.options import Options


def _grid(value: Any) -> Any:
    """Check the name of a grid."""
    if isinstance(value, Grid):
        return value.name
    if not isinstance(value, str) or value not in GRIDS:
        integer = f"int{value}".removesuffix("bit").removesuffix("-")
        hint = f"; write {integer}" if integer in GRIDS else f"; known: {', '.join(GRIDS)}"
        raise ValueError(f"grid {value!r} is not known{hint}")
    return value


def known_grid(name: Any) -> Grid | None:
    """Look up a grid by name, or None."""
    return name if isinstance(name, Grid) else GRIDS.get(name) if isinstance(name, str) else None


GridName = Annotated[str, BeforeValidator(_grid)]


def _group_size(value: Any) -> Any:
    if isinstance(value, bool) or not (value in ("channel", "tensor") or (isinstance(value, int) and value > 0)):
        raise ValueError(f"group_size {value!r} must be a positive number of columns, channel, or tensor")
    return value


GroupSizeOption = Annotated[GroupSize, BeforeValidator(_group_size)]


def check_grid(name: str, group_size: GroupSize, symmetric: bool) -> None:
    """Raise ValueError if a grid does not support these options."""
    grid_group = GRIDS[name].group_size
    if symmetric and GRIDS[name].offset:
        raise ValueError(f"symmetric: true: each group of {name} has a minimum; leave symmetric out")
    if not symmetric and GRIDS[name].symmetric_only:
        raise ValueError(f"symmetric: false needs an integer grid; {name} has no zero point; write symmetric: true")
    if grid_group is not None and group_size != grid_group:
        raise ValueError(
            f"group_size {group_size}: {name} has one scale for {grid_group} columns; write {grid_group}, or leave "
            "group_size out"
        )


class WeightGrid(Options):
    """The options of the weights' grid, for passes that quantize and passes that prepare quantization."""

    chooses_runs: ClassVar[bool] = False
    """Whether the pass chooses the codes of several columns together, as grids with a codebook need it."""

    weights: GridName = Field(default="int4", description=f"number grid of the weights: {', '.join(GRIDS)}")
    group_size: GroupSizeOption = Field(
        default=64,
        description="columns that share a scale; 'channel': a whole row, 'tensor': the whole matrix; some grids fix "
        "the group size (mxfp4, mxfp8: 32, nvfp4: 16)",
    )
    symmetric: bool = Field(default=True, description="no zero point; false: one zero point per scale (integer grids)")

    @model_validator(mode="before")
    @classmethod
    def _follow_grid(cls, values: Any) -> Any:
        """Options that follow from the grid, where none are given."""
        if not isinstance(values, dict):
            return values
        grid = known_grid(values.get("weights", cls.model_fields["weights"].default))
        return values if grid is None else cls.of_grid(grid, values) | values

    @classmethod
    def of_grid(cls, grid: Grid, options: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults of a grid, where they differ from those of the pass: a fixed group size; a minimum per group."""
        defaults: dict[str, Any] = {} if grid.group_size is None else {"group_size": grid.group_size}
        return defaults | ({"symmetric": False} if grid.offset else {})

    @property
    def grid(self) -> Grid:
        """The grid of the weights."""
        return GRIDS[self.weights]

    def grid_mismatch(self, later: Effects) -> str | None:
        """Return why a layer that is prepared for this grid does not suit the effects of a later pass, or None."""
        options = self.weights, self.group_size, self.symmetric
        later_options = [(codes.grid.name, codes.group_size, codes.symmetric) for codes in later.scheme.all_codes]
        if later_options == [options]:
            return None
        return f"it needs {_spelled(options)}; write the same options in both passes"

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        check_grid(self.weights, self.group_size, self.symmetric)
        if self.grid.run > 1 and not self.chooses_runs:
            raise ValueError(
                f"weights: {self.weights} takes {self.grid.run} columns together from a codebook, and {self.key()} "
                "rounds column by column; use gptq or rtn for it"
            )


def _spelled(grid: tuple[str, GroupSize, bool]) -> str:
    name, group_size, symmetric = grid
    return f"weights: {name}, group_size: {group_size}, symmetric: {str(symmetric).lower()}"
