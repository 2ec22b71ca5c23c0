"""`nvfp4-pack-quantized`, the layout of compressed-tensors for NVFP4 weights.

    <m>.weight_packed         uint8 [O, I/2]            E2M1 codes as in `fp4_pack`
    <m>.weight_scale          float8_e4m3fn [O, I/16]   one per 16 columns
    <m>.weight_global_scale   float32 [1]               a divisor: 448 * 6 / the largest magnitude

W ~ E2M1(code) * weight_scale / weight_global_scale. Servers fuse layers that read the same input (q, k, v; gate, up)
and then keep one global scale for all, so such layers are written with the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats import fp4_pack
from compress.formats.base import Scheme
from compress.numerics.grids import GRIDS, Grid
from compress.numerics.packed import PackedCodes

NAME = "nvfp4-pack-quantized"
GRID = GRIDS["nvfp4"]


def suits(scheme: Scheme) -> bool:
    """Whether the layout is meant for weights of this grid."""
    return scheme.grid is GRID


def refuses(scheme: Scheme, shape: tuple[int, int]) -> str | None:
    """Why this layout cannot hold a layer, and what can be written instead."""
    return fp4_pack.refuses(scheme, GRID, shape)


def adapt(packed: PackedCodes) -> PackedCodes:
    """The same weight as the layout can hold it."""
    return packed


def encode(packed: PackedCodes) -> dict[str, Tensor]:
    """The layer's tensors."""
    assert packed.shared is not None
    return {
        "weight_packed": fp4_pack.as_bytes(packed.words),
        "weight_scale": packed.scale.view(torch.float8_e4m3fn),
        "weight_global_scale": packed.shared,
    }


def decode(tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
    """The inverse of encode."""
    rows, half = tensors["weight_packed"].shape
    words, scale = fp4_pack.as_words(tensors["weight_packed"]), tensors["weight_scale"].view(torch.uint8)
    shared = tensors["weight_global_scale"]
    return PackedCodes(words, scale, None, GRID, scheme.group_size, (rows, 2 * half), shared=shared)


def weight_arguments(scheme: Scheme) -> dict[str, Any]:
    """The `weights` part of a config group (QuantizationArgs)."""
    return fp4_pack.weight_arguments(GRID, "tensor_group", "torch.float8_e4m3fn")


def grid_of(weights: Mapping[str, Any]) -> Grid:
    """The grid that the `weights` part of a config group speaks of."""
    return GRID
