"""The format `fp8`: 8-bit floats in blocks, as many large models are published.

    <m>.weight             float8_e4m3fn [O, I]
    <m>.weight_scale_inv   [ceil(O/R), ceil(I/C)] per block of R x C weights; one number with weight_block_size: null
                           floats, or exponents e of 2^(e - 127) as float8_e8m0fnu or uint8 (scale_fmt: ue8m0)
    <m>.activation_scale   one number with activation_scheme: static; input_scale in earlier checkpoints
    config.json: quantization_config = {quant_method: fp8, activation_scheme, weight_block_size: [128, 128], fmt: e4m3}

W ~ weight * weight_scale_inv, in spite of the name. Inputs are rounded to float8_e4m3fn: with a dynamic scale per token
and C columns, or per token without blocks; or with the static scale. A linear with a scale is quantized, all others are
dense; `modules_to_not_convert` repeats this in names of several generations of libraries.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils.quantization_config import FineGrainedFP8Config

from compress.checkpoint.formats.accepted import NULL, TEXT, TEXTS, UNUSED, Accepted, only, without_effect
from compress.checkpoint.formats.base import StoredLayer
from compress.checkpoint.formats.layouts.float_quantized import GRID, FloatQuantized
from compress.checkpoint.formats.read_only.reader import ReadOnly, input_scale, scalar
from compress.layers.base import InputTransform, WeightPart, checked
from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme

SCALES = ("weight_scale_inv", "weight_scale")
"""The names of the scale of the weights; the latter is that of AutoFP8."""
INPUT_SCALES = ("activation_scale", "input_scale")
BLOCK = Accepted(
    "two positive integers",
    lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    ),
)
LAYOUT = FloatQuantized()
EXPONENTS = {torch.uint8, *(getattr(torch, name) for name in ("float8_e8m0fnu",) if hasattr(torch, name))}
"""The dtypes of scales that are exponents."""
BIAS = 127


@dataclass(frozen=True)
class FP8(ReadOnly):
    """The `fp8` format.

    Attributes:
        block: rows and columns that share a scale; None: the whole weight.
        static: whether the scales of inputs are stored.
    """

    name = "fp8"
    quant_method = "fp8"
    keys: ClassVar[Mapping[str, Accepted]] = {
        "quant_method": TEXT,
        "activation_scheme": only("dynamic", "static"),
        "weight_block_size": NULL | BLOCK,
        "fmt": only("e4m3", "float8_e4m3fn", None),
        "scale_fmt": only("float", "ue8m0", None),
        "expert_dtype": only("fp8", None),
        "modules_to_convert": UNUSED,
        "kv_cache_scheme": NULL,
        **dict.fromkeys(("modules_to_not_convert", "ignored_layers"), TEXTS | NULL),
        **without_effect("dequantize"),
    }

    block: tuple[int, int] | None = None
    static: bool = False

    def of_config(self, config: Mapping[str, Any]) -> FP8:
        super().of_config(config)
        block = config.get("weight_block_size")
        return FP8(None if block is None else (block[0], block[1]), config.get("activation_scheme") == "static")

    @property
    def loading(self) -> dict[str, Any]:
        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        names = [name for name in shapes if any(f"{name}.{leaf}" in stored for leaf in SCALES)]
        return {name: self._scheme(shapes[name]) for name in names}

    def _scheme(self, shape: tuple[int, int]) -> LayerScheme:
        rounding = RoundingScheme(GRID, "static" if self.static else "token")
        if self.block is None:
            return LayerScheme(shape, (CodesScheme(GRID, "tensor"),), (rounding,))
        size = math.gcd(self.block[1], shape[1])  # a short last block is stored as smaller ones of equal scales
        rounding = rounding if self.static else RoundingScheme(GRID, "group", group=size)
        return LayerScheme(shape, (CodesScheme(GRID, size, rows=self.block[0]),), (rounding,))

    def unreadable(self, layers: Sequence[StoredLayer], dtype: torch.dtype) -> str | None:
        if self.block is None:
            return None
        uneven = next((layer.scheme.shape for layer in layers if _is_uneven(layer.scheme, self.block)), None)
        if uneven is None:
            return None
        return (
            f"transformers divides a weight {uneven[0]} x {uneven[1]} evenly among its scales, but its last block of "
            f"{self.block[0]} x {self.block[1]} is smaller"
        )

    def readable(self, scheme: LayerScheme) -> Collection[str]:
        return ("weight", *SCALES, *(INPUT_SCALES if self.static else ()))

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        name = next((leaf for leaf in SCALES if leaf in tensors), SCALES[0])
        scale = self._spread(name, as_floats(tensors[name]), scheme.shape)
        specs = LAYOUT.tensors(scheme)
        stored = checked({"weight": specs["weight"]}, tensors, "")
        stored |= checked({"weight_scale": specs["weight_scale"]}, {"weight_scale": scale}, "")
        rounding = scheme.rounding
        assert rounding is not None
        inputs = next((leaf for leaf in INPUT_SCALES if leaf in tensors), INPUT_SCALES[0])
        static = {"scale": input_scale(inputs, tensors)} if self.static else {}
        return [LAYOUT.decode(stored, scheme)], [InputRounding(rounding, scheme.shape, static)]

    def _spread(self, name: str, scale: Tensor, shape: tuple[int, int]) -> Tensor:
        """Repeat scales of blocks for the columns of smaller blocks. Raises ValueError for another shape."""
        if self.block is None:
            return scalar(name, scale)
        (rows, width), (block_rows, block_width) = shape, self.block
        expected = [math.ceil(rows / block_rows), math.ceil(width / block_width)]
        if list(scale.shape) != expected:
            raise ValueError(
                f"{name} is {list(scale.shape)}, but a weight {rows} x {width} has {expected[0]} x {expected[1]} "
                f"blocks of {block_rows} x {block_width}"
            )
        size = math.gcd(block_width, width)
        return scale.repeat_interleave(min(block_width, width) // size, dim=1)[:, : width // size].contiguous()


def _is_uneven(scheme: LayerScheme, block: tuple[int, int]) -> bool:
    """Return whether the last block of rows or columns of a quantized layer is smaller than the others."""
    return scheme.quantized and any(size % part for size, part in zip(scheme.shape, block, strict=True))


def as_floats(scale: Tensor) -> Tensor:
    """Convert scales that are exponents to float32; others are unchanged."""
    if scale.dtype not in EXPONENTS:
        return scale
    return torch.exp2(scale.view(torch.uint8).float() - BIAS)
