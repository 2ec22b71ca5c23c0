"""`mxfp4-pack-quantized`, the layout of compressed-tensors for MXFP4 weights (OCP Microscaling formats 1.0).

    <m>.weight_packed   uint8 [O, I/2]    E2M1 codes as in `fp4_pack`
    <m>.weight_scale    uint8 [O, I/32]   exponents e; the scale of 32 columns is 2^(e - 127)

W ~ E2M1(code) * 2^(e - 127), which bfloat16 holds exactly, so that every reader has the very same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from compress.formats import fp4_pack
from compress.formats.base import Scheme
from compress.numerics.grids import GRIDS, Grid
from compress.numerics.packed import PackedCodes

NAME = "mxfp4-pack-quantized"
GRID = GRIDS["mxfp4"]


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
    return {"weight_packed": fp4_pack.as_bytes(packed.words), "weight_scale": packed.scale}


def decode(tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
    """The inverse of encode."""
    rows, half = tensors["weight_packed"].shape
    words = fp4_pack.as_words(tensors["weight_packed"])
    return PackedCodes(words, tensors["weight_scale"], None, GRID, scheme.group_size, (rows, 2 * half))


def weight_arguments(scheme: Scheme) -> dict[str, Any]:
    """The `weights` part of a config group (QuantizationArgs)."""
    return fp4_pack.weight_arguments(GRID, "group", "torch.uint8")


def grid_of(weights: Mapping[str, Any]) -> Grid:
    """The grid that the `weights` part of a config group speaks of."""
    return GRID
