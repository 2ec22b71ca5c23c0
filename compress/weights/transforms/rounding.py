"""Rounding of inputs to a grid, with a scale per token or a static scale; columns with outliers are not rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Self

from compress.numerics.quant.grids import Grid
from compress.numerics.quant.inputs import outlier_columns, round_inputs
from compress.weights.base import InputTransform, TensorSpec, TransformScheme
from compress.weights.fields import read_grid


@dataclass(frozen=True)
class RoundingScheme(TransformScheme):
    """How inputs are rounded.

    scale: 'token': one per token, computed when the layer runs (ZeroQuant, Yao 2022, section 3.2); 'group': one per
    token and `group` columns, computed as well (arXiv 2412.19437, section 3.3.2); 'static': one for all tokens, stored.
    threshold: columns with a magnitude of at least `threshold` in a call are not rounded. columns: whether a stored set
    of columns is never rounded (LLM.int8, Dettmers 2022, section 3.2). symmetric: no zero point. clip: the share of the
    largest magnitude that a computed scale covers; larger ones saturate.
    """

    kind: ClassVar[str] = "rounding"
    readers: ClassVar[Mapping[str, Any]] = {"grid": read_grid}

    grid: Grid
    scale: Literal["token", "group", "static"] = "token"
    threshold: float | None = None
    columns: bool = False
    symmetric: bool = True
    group: int | None = None
    clip: float = 1.0

    @property
    def text(self) -> str:
        groups = "" if self.group is None else f" per {self.group} columns"
        return f"inputs {self.grid.name}" + groups + ("" if self.clip == 1 else f", clipped to {self.clip:g}")

    def check(self) -> None:
        super().check()
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip of rounding is {self.clip}, but it must be above 0 and at most 1")

    @property
    def outliers(self) -> bool:
        """Whether some columns are not rounded."""
        return self.threshold is not None or self.columns

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        found = {"scale": TensorSpec((1,))} if self.scale == "static" else {}
        return found | ({"outliers": TensorSpec((shape[1],), torch.bool)} if self.columns else {})


class InputRounding(InputTransform):
    """Rounding of inputs; returns dequantized values in the dtype of the inputs.

    With outlier columns, x W^T is the sum of an integer product and a float product over those columns.
    scale: [1], static, or None. columns: [in], True for columns that are never rounded, or None.
    """

    kind: ClassVar[str] = "rounding"
    names: ClassVar[Mapping[str, str]] = {"scale": "scale", "columns": "outliers"}
    rank: ClassVar[int] = 100  # the last transform, because integer kernels include it
    linear: ClassVar[bool] = False
    in_kernel: ClassVar[bool] = True

    scheme: RoundingScheme
    scale: Float[Tensor, " 1"] | None
    columns: Bool[Tensor, " in"] | None

    @classmethod
    def of(
        cls, grid: Grid, scale: Float[Tensor, " 1"] | None = None, threshold: float | None = None,
        columns: Bool[Tensor, " in"] | None = None, symmetric: bool = True, shape: tuple[int, int] = (0, 0),
        group: int | None = None, clip: float = 1.0,
    ) -> Self:  # fmt: skip
        """Round to a grid. scale: static, or None for one per token (and group). Other arguments as in the scheme."""
        kind = "static" if scale is not None else "token" if group is None else "group"
        scheme = RoundingScheme(grid, kind, threshold, columns is not None, symmetric, group, clip)
        return cls(scheme, shape, {"scale": scale, "columns": columns})

    @classmethod
    def covering(cls, grid: Grid, top: Float[Tensor, ""], dtype: torch.dtype) -> Self:
        """Round to a grid with a static scale, stored in `dtype`, that covers magnitudes up to `top`."""
        scale, _ = grid.fit(-top.reshape(1), top.reshape(1), True, dtype)
        return cls.of(grid, scale.to(dtype))

    @property
    def grid(self) -> Grid:
        """The grid of the inputs."""
        return self.scheme.grid

    @property
    def threshold(self) -> float | None:
        """The magnitude from which a column is not rounded, or None."""
        return self.scheme.threshold

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        spared = outlier_columns(x, self.threshold, self.columns)
        return round_inputs(
            x, self.grid, self.scale, spared, self.scheme.symmetric, self.scheme.group, self.scheme.clip
        )

    def computes_like(self, other: InputRounding) -> bool:
        """Whether both round every input to the same numbers, by the input alone."""
        return self.scheme == other.scheme and self.scheme.scale != "static" and not self.scheme.outliers

    def permuted(self, order: Int[Tensor, " in"]) -> InputRounding:
        columns = None if self.columns is None else self.columns[order]
        return InputRounding(self.scheme, self.shape, {"scale": self.scale, "columns": columns})
