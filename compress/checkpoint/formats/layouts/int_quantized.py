"""`int-quantized`, the 8-bit layout of compressed-tensors for integer weights and activations (W8A8).

    <m>.weight              int8  [O, I]              signed codes
    <m>.weight_scale        float [O, 1] per channel; [1] per tensor
    <m>.weight_zero_point   int8  like the scale      only if asymmetric
    <m>.input_scale         float [1]                 only with a static activation scale

Activations that are rounded per token at run time need no tensors. W ~ (q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.checkpoint.formats.layouts.layout import Layout, codes_of
from compress.checkpoint.formats.layouts.pack_quantized import refuses_integers
from compress.layers.base import TensorSpec
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import GRIDS

INT8 = GRIDS["int8"]


class IntQuantized(Layout):
    """The `int-quantized` layout."""

    name = "int-quantized"

    def suits(self, scheme: LayerScheme) -> bool:
        """Whether servers run a layer of this scheme with integers: int8 weights per channel or tensor, int8 inputs."""
        codes, rounding = scheme.codes, scheme.rounding
        if codes is None or codes.grid is not INT8 or rounding is None or rounding.grid is not INT8:
            return False
        return codes.group_size in ("channel", "tensor") and not codes.indexed

    def refuses(self, scheme: LayerScheme) -> str | None:
        return refuses_integers(scheme)

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        codes = codes_of(scheme)
        scales = (1,) if codes.group_size == "tensor" else (scheme.shape[0], 1)
        specs = {"weight": TensorSpec(scheme.shape, torch.int8), "weight_scale": TensorSpec(scales)}
        return specs if codes.symmetric else specs | {"weight_zero_point": TensorSpec(scales, torch.int8)}

    def encode(self, part: CodesPart) -> dict[str, Tensor]:
        flat = part.group_size == "tensor"
        tensors = {"weight": part.codes().codes, "weight_scale": part.scale.reshape(1) if flat else part.scale}
        if part.zero is not None:
            tensors["weight_zero_point"] = part.zero.reshape(1) if flat else part.zero
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> CodesPart:
        codes = codes_of(scheme)
        scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
        if codes.group_size == "tensor":
            scale, zero = scale.reshape(1, 1), None if zero is None else zero.reshape(1, 1)
        return CodesPart.of(Codes(tensors["weight"], scale, zero, codes.grid, codes.group_size))
