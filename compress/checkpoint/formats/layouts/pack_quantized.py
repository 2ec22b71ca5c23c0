"""`pack-quantized`, the packed integer layout of compressed-tensors (W4A16, W8A16, 2 to 8 bits).

    <m>.weight_packed       int32 [O, ceil(I*b/32)]   codes q + 2^(b-1), a dense bit stream along the input axis, least
                                                      significant bit first, across word borders (3, 5, 6, 7 bits)
    <m>.weight_scale        float [O, G]; [O, 1] per channel; [1] per tensor
    <m>.weight_zero_point   int32 [ceil(O*b/32), G]   zero + 2^(b-1), packed along the OUTPUT axis; only if asymmetric
    <m>.weight_shape        int64 [2]                 (O, I)
    <m>.weight_g_idx        int32 [I]                 the group of each column, with actorder: group; only read

W ~ (q - zero) * scale. The reader supports only rows that divide into groups of equal size, and no group index. A
short last group is therefore stored as groups of gcd(I, group_size) columns with repeated scales: the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.layouts.layout import Layout, codes_of, columns_of_group
from compress.layers.base import TensorSpec
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.bits import pack, packed_width, unpack, whole_words
from compress.numerics.quant.codes import groups_in
from compress.numerics.quant.grids import GRIDS, IntGrid

SMALLEST_GROUP = 16  # smaller groups for a short last one would add more bytes of scales than codes save


def stored_group_size(width: int, group_size: int) -> int:
    """The group size in the file: the greatest common divisor of the given one and the width."""
    return math.gcd(width, group_size)


def refuses_integers(scheme: LayerScheme) -> str | None:
    """Why no reader supports integers of this scheme, and how to change the recipe; None if one does."""
    codes, rounding, width = codes_of(scheme), scheme.rounding, scheme.shape[1]
    if rounding is not None and rounding.grid is not GRIDS["int8"] and not _with_floats(scheme):
        return (
            f"activations {rounding.grid.name} cannot be combined with these integer weights; use int8 (with symmetric "
            "int4 weights also fp8_e4m3 and activation_scale: token), or format: native"
        )
    if codes.indexed:
        return (
            "act_order: group has no reader (compressed-tensors no longer supports it); "
            "use act_order: static, or format: native"
        )
    size = codes.group_size
    if not codes.symmetric and size == "tensor":
        return "zero points per tensor cannot be packed; use group_size: channel, or symmetric: true"
    if isinstance(size, int) and stored_group_size(width, size) < min(SMALLEST_GROUP, size):
        return f"group_size {size} does not divide the {width} inputs; {sizes_that_work(width)}"
    return None


def _with_floats(scheme: LayerScheme) -> bool:
    """Whether inputs are rounded to 8-bit floats per token, next to int4 weights without zero points (W4AFP8)."""
    codes, rounding = codes_of(scheme), scheme.rounding
    floats = rounding is not None and rounding.grid is GRIDS["fp8_e4m3"] and rounding.scale == "token"
    return floats and codes.symmetric and codes.grid is GRIDS["int4"]


def sizes_that_work(width: int) -> str:
    """A text such as 'use 32, 64, 192, channel, or format: native': group sizes from 16 to 256 that divide a width."""
    sizes = [str(size) for size in range(16, 257) if width % size == 0]
    return f"use {', '.join([*sizes, 'channel'])}, or format: native"


def input_arguments(scheme: LayerScheme) -> dict[str, Any]:
    """The `input_activations` part of a config group: a dynamic scale per token (and group), or one static scale.

    Scales that are coded have a dtype; those of groups with a static global scale are dynamic in part ('local').
    """
    rounding = scheme.rounding
    assert rounding is not None
    strategies = {"static": ("tensor", False), "local": ("tensor_group", "local")}
    strategy, dynamic = strategies.get(rounding.scale, (rounding.scale, True))
    groups: dict[str, Any] = {} if rounding.group is None else {"group_size": rounding.group}
    scaling = rounding.grid.scaling
    dtype = torch.float8_e4m3fn if scaling.fused else scaling.stored
    coded = {} if dtype is None else {"scale_dtype": str(dtype)}
    return {
        "num_bits": rounding.grid.bits,
        "type": "int" if isinstance(rounding.grid, IntGrid) else "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        **groups,
        **coded,
    }


class PackQuantized(Layout):
    """The `pack-quantized` layout: all integer weights that do not suit `int_quantized`."""

    name = "pack-quantized"

    def refuses(self, scheme: LayerScheme) -> str | None:
        return refuses_integers(scheme)

    def adapt(self, codes: CodesScheme, width: int) -> CodesScheme:
        """The scheme of the same codes in groups that the layout supports."""
        size = codes.group_size
        return codes if not isinstance(size, int) else replace(codes, group_size=stored_group_size(width, size))

    def adapt_part(self, part: CodesPart) -> CodesPart:
        """The same weight in groups that the layout supports."""
        width, size = part.shape[1], part.group_size
        if not isinstance(size, int) or width % size == 0:
            return part
        stored = stored_group_size(width, size)
        group = torch.arange(width // stored, device=part.scale.device) * stored // size
        zero = None if part.zero is None else part.zero[:, group]
        return part.changed(replace(part.scheme, group_size=stored), scale=part.scale[:, group], zero=zero)

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        codes, (rows, width) = codes_of(scheme), scheme.shape
        bits, groups = codes.grid.bits, groups_in(width, codes.group_size)
        specs = {
            "weight_packed": TensorSpec((rows, packed_width(width, bits)), torch.int32),
            "weight_scale": TensorSpec((1,) if codes.group_size == "tensor" else (rows, groups)),
            "weight_shape": TensorSpec((2,), torch.int64),
        }
        if codes.indexed:
            specs["weight_g_idx"] = TensorSpec((width,), torch.int32)
        if codes.symmetric:
            return specs
        return specs | {"weight_zero_point": TensorSpec((packed_width(rows, bits), groups), torch.int32)}

    def units(self, codes: CodesScheme) -> tuple[int, int]:
        words = whole_words(codes.grid.bits)
        return 1 if codes.symmetric else words, math.lcm(columns_of_group(codes), words)

    def encode(self, part: CodesPart) -> dict[str, Tensor]:
        scale = part.scale.reshape(1) if part.group_size == "tensor" else part.scale
        shape = torch.tensor(part.shape, dtype=torch.int64)
        tensors = {"weight_packed": part.words, "weight_scale": scale, "weight_shape": shape}
        if part.zero is not None:
            unsigned = part.zero.to(torch.int16) - part.grid.lowest_stored
            tensors["weight_zero_point"] = pack(unsigned.T, part.grid.bits).T
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> CodesPart:
        codes, rows = codes_of(scheme), scheme.shape[0]
        if tuple(tensors["weight_shape"].tolist()) != scheme.shape:
            raise ValueError(f"weight_shape is {tensors['weight_shape'].tolist()}, but it must be {list(scheme.shape)}")
        scale, zero = tensors["weight_scale"], None
        scale = scale.reshape(1, 1) if codes.group_size == "tensor" else scale
        if "weight_zero_point" in tensors:
            unsigned = unpack(tensors["weight_zero_point"].T, codes.grid.bits, rows).T
            zero = (unsigned.to(torch.int16) + codes.grid.lowest_stored).to(torch.int8).contiguous()
        index = tensors["weight_g_idx"] if codes.indexed else None
        if index is not None and int(index.min()) == -1:  # not computed: the columns are in order
            index = torch.arange(scheme.shape[1], dtype=torch.int32, device=index.device) // int(codes.group_size)
        fields = {"words": tensors["weight_packed"], "scale": scale, "zero": zero, "group_index": index}
        return CodesPart(codes, scheme.shape, fields)
