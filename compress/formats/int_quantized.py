"""`int-quantized`, the 8-bit layout of compressed-tensors for integer weights and activations (W8A8).

    <m>.weight              int8  [O, I]              signed codes
    <m>.weight_scale        float [O, 1] per channel; [1] per tensor
    <m>.weight_zero_point   int8  like the scale      only if asymmetric
    <m>.input_scale         float [1]                 only with static activations

Activations that are rounded per token when the model runs need no tensors. W ~ (q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats import pack_quantized
from compress.formats.base import Scheme
from compress.numerics.codes import Codes
from compress.numerics.grids import Grid
from compress.numerics.packed import PackedCodes

NAME = "int-quantized"


def suits(scheme: Scheme) -> bool:
    """Whether servers run a layer of this scheme in integers: int8 weights per channel or tensor, int8 inputs."""
    integers = scheme.coded.name == "int8" and scheme.activations is not None and scheme.activations.name == "int8"
    return integers and scheme.group_size in ("channel", "tensor") and not scheme.indexed


def refuses(scheme: Scheme, shape: tuple[int, int]) -> str | None:
    """Why this layout cannot hold a layer, and what can be written instead."""
    return pack_quantized.refuses(scheme, shape)


def adapt(packed: PackedCodes) -> PackedCodes:
    """The same weight as the layout can hold it."""
    return packed


def encode(packed: PackedCodes) -> dict[str, Tensor]:
    """The layer's tensors."""
    flat = packed.group_size == "tensor"
    found = {
        "weight": packed.codes().codes,
        "weight_scale": packed.scale.reshape(1) if flat else packed.scale,
    }
    if packed.zero is not None:
        found["weight_zero_point"] = packed.zero.reshape(1) if flat else packed.zero
    return found


def decode(tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
    """The inverse of encode."""
    flat = scheme.group_size == "tensor"
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
    if flat:
        scale, zero = scale.reshape(1, 1), None if zero is None else zero.reshape(1, 1)
    codes = tensors["weight"].to(torch.int8)
    return PackedCodes.of(Codes(codes, scale, zero, scheme.coded, scheme.group_size))


def weight_arguments(scheme: Scheme) -> dict[str, Any]:
    """The `weights` part of a config group (QuantizationArgs)."""
    return pack_quantized.weight_arguments(scheme)


def grid_of(weights: Mapping[str, Any]) -> Grid:
    """The grid that the `weights` part of a config group speaks of."""
    return pack_quantized.grid_of(weights)
