"""`int-quantized`, the 8-bit layout of compressed-tensors for integer weights and activations (W8A8).

    <m>.weight              int8  [O, I]              signed codes
    <m>.weight_scale        float [O, 1] per channel; [1] per tensor
    <m>.weight_zero_point   int8  like the scale      only if asymmetric
    <m>.input_scale         float [1]                 only with static activations

Activations that are rounded per token when the model runs need no tensors. W ~ (q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats.base import Scheme
from compress.formats.layouts.layout import Layout
from compress.formats.layouts.pack_quantized import refuses_integers
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.packed import PackedCodes


class IntQuantized(Layout):
    """The `int-quantized` layout."""

    name = "int-quantized"

    def suits(self, scheme: Scheme) -> bool:
        """Whether servers run a layer of this scheme in integers: int8 weights per channel or tensor, int8 inputs."""
        integers = scheme.coded.name == "int8" and scheme.activations is not None and scheme.activations.name == "int8"
        return integers and scheme.group_size in ("channel", "tensor") and not scheme.indexed

    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        return refuses_integers(scheme, shape)

    def encode(self, packed: PackedCodes) -> dict[str, Tensor]:
        flat = packed.group_size == "tensor"
        found = {
            "weight": packed.codes().codes,
            "weight_scale": packed.scale.reshape(1) if flat else packed.scale,
        }
        if packed.zero is not None:
            found["weight_zero_point"] = packed.zero.reshape(1) if flat else packed.zero
        return found

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        flat = scheme.group_size == "tensor"
        scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
        if flat:
            scale, zero = scale.reshape(1, 1), None if zero is None else zero.reshape(1, 1)
        codes = tensors["weight"].to(torch.int8)
        return PackedCodes.of(Codes(codes, scale, zero, scheme.coded, scheme.group_size))
