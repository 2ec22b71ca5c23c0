"""Activation quantization: dynamic scales per token or static scales, for all channels or for groups of channels.

Outlier columns are not quantized.

    input_scale       float [1], [groups]   static scales; one per group of channels
    input_global_scale  float32 [1]         the number that the scales of groups share, with scale `local`
    input_zero_point  int8 [groups]         static zero points of groups of channels, where they are not symmetric
    input_g_idx       int32 [I]             the group of each channel, only for groups of channels
    input_outliers    bool [I]              the outlier channels, which are not quantized; only if `columns`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Self

from compress.layers.base import InputTransform, TensorSpec, TransformScheme, stored_name
from compress.layers.fields import read_grid
from compress.layers.parts.codes import check_index
from compress.numerics.quant.grids import Grid
from compress.numerics.quant.inputs import outlier_columns, round_in_groups, round_inputs

InputScale = Literal["token", "group", "static", "local"]
"""Where the scales of inputs come from; see `RoundingScheme`."""


@dataclass(frozen=True)
class RoundingScheme(TransformScheme):
    """The options of activation quantization.

    Attributes:
        grid: number grid of the activations.
        scale: 'token' for a dynamic scale per token (ZeroQuant, Yao 2022, section 3.2), 'group' for a dynamic scale per
            token and `group` columns (arXiv 2412.19437, section 3.3.2), 'static' for a stored scale for all tokens,
            'local' for scales as of 'group' that are coded relative to a stored number (NVFP4).
        threshold: columns with a magnitude of at least `threshold` in a call are not quantized.
        columns: whether a stored set of columns is not quantized (LLM.int8, Dettmers 2022, section 3.2).
        symmetric: whether there is no zero point.
        group: columns that share a scale, with scale 'group' or 'local'.
        clip: fraction of the largest magnitude that a dynamic scale covers; larger magnitudes saturate.
        groups: number of groups of channels with separate scales (and zero points unless symmetric), static or dynamic
            per token. The group of every channel is stored, so groups may have any size and need not be contiguous
            (PEG, Bondarenko 2021, section 4; RPTQ, Yuan 2023). None for no such groups.
    """

    kind: ClassVar[str] = "rounding"
    readers: ClassVar[Mapping[str, Any]] = {"grid": read_grid}

    grid: Grid
    scale: InputScale = "token"
    threshold: float | None = None
    columns: bool = False
    symmetric: bool = True
    group: int | None = None
    clip: float = 1.0
    groups: int | None = None

    @property
    def text(self) -> str:
        groups = "" if self.group is None else f" per {self.group} columns"
        groups += "" if self.groups is None else f" in {self.groups} groups of channels"
        groups += ", static global scale" if self.scale == "local" else ""
        return f"inputs {self.grid.name}" + groups + ("" if self.clip == 1 else f", clipped to {self.clip:g}")

    def check(self) -> None:
        super().check()
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip of rounding is {self.clip}, but it must be above 0 and at most 1")
        in_groups = self.scale in ("group", "local")
        if self.groups is not None and (in_groups or self.outliers):
            raise ValueError("groups of rounding exclude scale 'group' and outlier columns")
        if (self.group is None) == in_groups:
            raise ValueError("rounding has a number of columns (group) with scale 'group' or 'local', and only there")
        if self.scale == "local" and not self.grid.scaling.fused:
            raise ValueError(f"the scales of {self.grid.name} share no number, so that scale 'local' has none to store")
        if self.group is not None and self.outliers:
            raise ValueError(f"scale {self.scale!r} of rounding excludes outlier columns")
        if not self.grid.rounds_inputs(in_groups=self.group is not None):
            raise ValueError(f"inputs cannot be rounded to {self.grid.name} with scale {self.scale!r}")

    @property
    def outliers(self) -> bool:
        """Whether some columns are not quantized."""
        return self.threshold is not None or self.columns

    def refuses(self, shape: tuple[int, int]) -> str | None:
        if self.group is not None and shape[1] % self.group:
            return f"groups of {self.group} columns do not divide its {shape[1]} inputs; leave the layer out (ignore)"
        return None

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        static, count = self.scale == "static", self.groups or 1
        specs = {"scale": TensorSpec((count,))} if static else {}
        specs |= {"zero_point": TensorSpec((count,), torch.int8)} if static and self.zeros else {}
        specs |= {"g_idx": TensorSpec((shape[1],), torch.int32)} if self.groups else {}
        specs |= {"global_scale": TensorSpec((1,), torch.float32)} if self.scale == "local" else {}
        return specs | ({"outliers": TensorSpec((shape[1],), torch.bool)} if self.columns else {})

    @property
    def zeros(self) -> bool:
        """Whether groups of channels have zero points."""
        return self.groups is not None and not self.symmetric


class InputRounding(InputTransform[RoundingScheme]):
    """Quantize and dequantize activations; the dtype of the inputs is preserved.

    With outlier columns, x W^T is the sum of an integer product and a float product over those columns.

    Attributes:
        scale: static scales [1] or [groups], or None.
        zero: static zero points [groups], or None.
        group_index: group of each channel [in], or None.
        columns: True for outlier columns, which are not quantized [in], or None.
        shared: the number that all scales share [1], or None.
    """

    kind: ClassVar[str] = "rounding"
    names: ClassVar[Mapping[str, str]] = {
        "scale": "scale",
        "zero": "zero_point",
        "group_index": "g_idx",
        "columns": "outliers",
        "shared": "global_scale",
    }
    rank: ClassVar[int] = 100  # the last transform, because integer kernels include it
    linear: ClassVar[bool] = False
    in_kernel: ClassVar[bool] = True

    scale: Float[Tensor, " groups"] | None
    zero: Int[Tensor, " groups"] | None
    group_index: Int[Tensor, " in"] | None
    columns: Bool[Tensor, " in"] | None
    shared: Float[Tensor, " 1"] | None

    @classmethod
    def of(
        cls,
        grid: Grid,
        scale: Float[Tensor, " 1"] | None = None,
        threshold: float | None = None,
        columns: Bool[Tensor, " in"] | None = None,
        symmetric: bool = True,
        shape: tuple[int, int] = (0, 0),
        group: int | None = None,
        clip: float = 1.0,
    ) -> Self:
        """Create a quantizer with one static scale, or with dynamic scales.

        Args:
            grid: number grid of the activations.
            scale: static scale; None for a dynamic scale per token (and group).
            threshold: magnitude from which a column is not quantized, or None.
            columns: True for outlier columns, or None.
            symmetric: whether there is no zero point.
            shape: (out, in) of the layer.
            group: columns that share a dynamic scale, or None for all.
            clip: fraction of the largest magnitude that a dynamic scale covers.
        """
        kind = "static" if scale is not None else "token" if group is None else "group"
        scheme = RoundingScheme(grid, kind, threshold, columns is not None, symmetric, group, clip)
        return cls(scheme, shape, {"scale": scale, "columns": columns})

    @classmethod
    def covering(cls, grid: Grid, top: Float[Tensor, ""], dtype: torch.dtype) -> Self:
        """Create a quantizer with a static scale.

        Args:
            grid: number grid of the activations.
            top: largest magnitude that the scale covers.
            dtype: dtype of the scale.
        """
        scale, _ = grid.fit(-top.reshape(1), top.reshape(1), True, dtype)
        return cls.of(grid, scale.to(dtype))

    @classmethod
    def local(cls, scheme: RoundingScheme, top: Float[Tensor, ""] | None) -> Self:
        """Create a quantizer with dynamic scales that are coded relative to a static number.

        Args:
            scheme: options with scale 'local'.
            top: largest magnitude that the scales cover without saturation; None: not known, the number is 1.
        """
        shared = torch.ones(1) if top is None else scheme.grid.scaling.shared_per_token(top.float(), scheme.grid.span)
        assert shared is not None, "checked by the scheme"
        return cls(scheme, (0, 0), {"shared": shared.reshape(1)})

    @classmethod
    def of_groups(
        cls,
        grid: Grid,
        index: Int[Tensor, " in"],
        groups: int,
        symmetric: bool,
        ranges: tuple[Float[Tensor, " groups"], Float[Tensor, " groups"]] | None,
        dtype: torch.dtype,
    ) -> Self:
        """Create a quantizer with separate scales for groups of channels.

        Args:
            grid: number grid of the activations.
            index: group of each channel.
            groups: number of groups.
            symmetric: whether there are no zero points.
            ranges: static (low, high) of every group; None for dynamic ranges per token.
            dtype: dtype of static scales.
        """
        scheme = RoundingScheme(grid, "token" if ranges is None else "static", symmetric=symmetric, groups=groups)
        tensors: dict[str, Tensor | None] = {"group_index": index.to(torch.int32)}
        if ranges is not None:
            scale, zero = grid.fit(*ranges, symmetric, dtype)
            tensors |= {"scale": scale.to(dtype), "zero": None if zero is None else grid.encode_zero(zero, None)}
        return cls(scheme, (0, len(index)), tensors)

    @property
    def grid(self) -> Grid:
        """The number grid of the activations."""
        return self.scheme.grid

    @property
    def threshold(self) -> float | None:
        """The magnitude from which a column is not quantized, or None."""
        return self.scheme.threshold

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        scheme = self.scheme
        if self.group_index is not None:
            index, count = self.group_index.long(), scheme.groups or 1
            return round_in_groups(x, scheme.grid, index, count, self.scale, self.zero, scheme.symmetric, scheme.clip)
        outlier_mask = outlier_columns(x, self.threshold, self.columns)
        scale = self.scale if self.shared is None else self.shared
        return round_inputs(x, scheme.grid, scale, outlier_mask, scheme.symmetric, scheme.group, scheme.clip)

    def computes_like(self, other: InputRounding) -> bool:
        """Return whether both quantizers are dynamic and give the same values for every input."""
        is_dynamic = self.scheme.scale in ("token", "group") and not self.scheme.outliers and self.scheme.groups is None
        return is_dynamic and self.scheme == other.scheme

    def permuted(self, order: Int[Tensor, " in"]) -> InputRounding:
        scheme, index, size = self.scheme, self.group_index, self.scheme.group
        if size is not None and not scheme.grid.scaling.fused:  # contiguous groups of each token, which move
            index = torch.arange(len(order), device=order.device, dtype=torch.int32) // size
            scheme = replace(scheme, scale="token", group=None, groups=len(order) // size)
        columns = None if self.columns is None else self.columns[order]
        index = None if index is None else index[order]
        tensors = {"scale": self.scale, "zero": self.zero, "group_index": index, "columns": columns}
        return InputRounding(scheme, self.shape, tensors | {"shared": self.shared})

    def validate(self, prefix: str) -> None:
        super().validate(prefix)
        if self.group_index is not None and self.scheme.groups is not None:
            check_index(stored_name(prefix, "g_idx"), self.group_index, self.scheme.groups)
        if self.scale is not None and float(self.scale.min()) <= 0:
            raise ValueError(f"{stored_name(prefix, 'scale')} holds a scale that is not positive")
        if self.shared is not None and float(self.shared) <= 0:
            raise ValueError(f"{stored_name(prefix, 'global_scale')} is {float(self.shared)}, but it must be positive")
