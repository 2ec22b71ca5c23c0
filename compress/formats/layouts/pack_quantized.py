"""`pack-quantized`, the packed integer layout of compressed-tensors (W4A16, W8A16, 2 to 8 bits).

    <m>.weight_packed       int32 [O, ceil(I*b/32)]   codes q + 2^(b-1), a dense bit stream along the input axis, least
                                                      significant bit first, codes cross word borders (3, 5, 6, 7 bits)
    <m>.weight_scale        float [O, G]; [O, 1] per channel; [1] per tensor
    <m>.weight_zero_point   int32 [ceil(O*b/32), G]   zero + 2^(b-1), packed along the OUTPUT axis; only if asymmetric
    <m>.weight_shape        int64 [2]                 (O, I)

W ~ (q - zero) * scale. The reader divides a row into whole groups of equal size only, and has no group index. A short
last group is therefore stored as groups of gcd(I, group_size) columns with repeated scales, which is the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.formats.base import Scheme
from compress.formats.layouts.layout import Layout
from compress.numerics.quant.bits import pack, unpack
from compress.numerics.quant.grids import GRIDS, IntGrid
from compress.numerics.quant.packed import PackedCodes

SMALLEST_GROUP = 16  # a finer split of a short last group would cost more in scales than it saves


def stored_group_size(width: int, group_size: int) -> int:
    """The group size in the file: as asked where it divides the width, otherwise the greatest common divisor."""
    return math.gcd(width, group_size)


def refuses_integers(scheme: Scheme, shape: tuple[int, int]) -> str | None:
    """Why integers of this scheme and shape have no reader, and what can be written instead; None if they have."""
    width = shape[1]
    if scheme.activations not in (None, GRIDS["int8"]):
        assert scheme.activations is not None
        name = scheme.activations.name
        return f"activations {name} cannot be combined with integer weights; use int8, or format: native"
    if scheme.indexed:
        return (
            "act_order: group has no reader any more (compressed-tensors dropped it); "
            "use act_order: static, or format: native"
        )
    if not scheme.symmetric and scheme.group_size == "tensor":
        return "zero points per tensor cannot be packed; use group_size: channel, or symmetric: true"
    if isinstance(scheme.group_size, int) and stored_group_size(width, scheme.group_size) < min(
        SMALLEST_GROUP, scheme.group_size
    ):
        return f"group_size {scheme.group_size} does not divide the {width} inputs; {sizes_that_work(width)}"
    return None


def sizes_that_work(width: int) -> str:
    """'use 32, 64 or 192, or format: native': group sizes near the usual ones that divide a width."""
    sizes = [str(size) for size in range(16, 257) if width % size == 0]
    return f"use {', '.join([*sizes, 'channel'])}, or format: native"


def input_arguments(scheme: Scheme) -> dict[str, Any]:
    """The `input_activations` part: one scale per token, found at run time, or a stored one for all."""
    grid, static = scheme.activations, scheme.activation_scale == "static"
    assert grid is not None
    kind = "int" if isinstance(grid, IntGrid) else "float"
    strategy = "tensor" if static else "token"
    return {"num_bits": grid.bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": not static}


class PackQuantized(Layout):
    """The `pack-quantized` layout; of 8-bit weights, for those that `int_quantized` does not suit."""

    name = "pack-quantized"

    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        return refuses_integers(scheme, shape)

    def adapt(self, packed: PackedCodes) -> PackedCodes:
        """The same weight in groups that the layout can hold."""
        width, size = packed.shape[1], packed.group_size
        if not isinstance(size, int) or width % size == 0:
            return packed
        stored = stored_group_size(width, size)
        group = torch.arange(width // stored, device=packed.scale.device) * stored // size
        zero = None if packed.zero is None else packed.zero[:, group]
        return replace(packed, scale=packed.scale[:, group], zero=zero, group_size=stored)

    def encode(self, packed: PackedCodes) -> dict[str, Tensor]:
        scale = packed.scale.reshape(1) if packed.group_size == "tensor" else packed.scale
        shape = torch.tensor(packed.shape, dtype=torch.int64)
        found = {"weight_packed": packed.words, "weight_scale": scale, "weight_shape": shape}
        if packed.zero is not None:
            assert isinstance(packed.grid, IntGrid)
            unsigned = packed.zero.to(torch.int16) - packed.grid.lowest
            found["weight_zero_point"] = pack(unsigned.T, packed.grid.bits).T
        return found

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        rows, width = tensors["weight_packed"].shape[0], int(tensors["weight_shape"][1])
        scale = tensors["weight_scale"]
        scale = scale.reshape(1, 1) if scheme.group_size == "tensor" else scale
        zero = None
        if "weight_zero_point" in tensors:
            assert isinstance(scheme.grid, IntGrid)
            unsigned = unpack(tensors["weight_zero_point"].T, scheme.grid.bits, rows).T
            zero = (unsigned.to(torch.int16) + scheme.grid.lowest).to(torch.int8).contiguous()
        return PackedCodes(tensors["weight_packed"], scale, zero, scheme.coded, scheme.group_size, (rows, width))
