"""Our own format: every grid, any group size (short last group included), groups by column index, sparse layers.

    <m>.weight_packed       int32 [O, ceil(I*b/32)]   unsigned codes, a dense bit stream along the input axis, least
                                                      significant bit first (q - lowest; level index; bit pattern)
    <m>.weight_scale        float [O, G]              [1, 1] per tensor; uint8 where the grid stores scales in a byte:
                                                      mxfp4 an exponent 2^(e-127); nvfp4 the bits of an 8-bit float
                                                      (e4m3); nf4_dq a byte, times the step of its block
    <m>.weight_scale_shared float32 [n]               nvfp4: [1], by which scales are divided; nf4_dq: the mean scale,
                                                      then the step of every 256 scales, row by row:
                                                      scale = mean + (byte - 128) * step
    <m>.weight_zero_point   int8  [O, G]              only with zero points; float where float_zeros says so
    <m>.weight_g_idx        int32 [I]                 only with a group index
    <m>.input_permutation   int32 [I]                 input j of the matrix is input p[j] of the layer; only where a
                                                      permutation stayed there
    <m>.input_channel_scale float32 [I]               inputs are divided by it then; only where a scale stayed there
    <m>.input_scale         float [1]                 only with a static scale of the (divided) inputs' grid
    <m>.input_outliers      bool [I]                  columns whose inputs are not rounded; only where calibrated
    config.json: quantization_config = {quant_method: compress, version, layers: {name: {grid, group_size,
                 symmetric, indexed, activations, width}}}, and where they are not the usual: activation_scale
                 (static), outlier_threshold, outlier_columns, input_scaled, input_permuted, float_zeros

Pruned layers whose config says sparse: {pattern, kept} hold their kept weights alone, in the order of rows, then
columns; `kept` counts them. The pattern is N:M (N kept of every M columns, in the K = floor(I/M) whole groups of every
row; the columns behind these, I - K*M, are all kept) or bitmask (kept anywhere):

                            N:M                       bitmask
    <m>.weight_kept         int32 [O, ceil(K*N*i/32)] int32 [O, ceil(I/32)]   where they stand. N:M: the column in its
                                                      group of every kept weight of the groups, ascending, in
                                                      i = ceil(log2 M) bits (M up to 256). bitmask: a bit per column,
                                                      1 for kept. Bit streams row by row, least significant bit first
    <m>.weight_values       float [O, K*N + I - K*M]  float [kept]            where grid is null: weights as they are
    <m>.weight_packed       int32 [O, ceil(that*b/32)] int32 [ceil(kept*b/32)] otherwise: codes; scales, zero points and
                                                      group indexes are those of the whole matrix, as above

The mask that is read back is the one that pruning made, bit for bit: it says which weights were kept, not which are not
zero. A kept weight that is zero, or was rounded to it, is stored like any other and stays out of what is pruned; all
others are exactly zero. A pruned layer that is smaller with its zeros in place (where few weights of few bits were
pruned, positions cost more than is saved) is stored so, without its mask, unless the recipe says `sparse: always`.

Read by `compress.load` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats.base import CacheScheme, Format, Scheme
from compress.numerics.quant.grids import Grid
from compress.numerics.quant.packed import PackedCodes
from compress.numerics.sparse.positions import Kept, SparseWeight, Sparsity


class Native(Format):
    """The `native` format."""

    name = "native"
    sparse = True
    input_names = {
        "input_permutation": "input_permutation",
        "input_scale": "input_channel_scale",
        "activation_scale": "input_scale",
        "outliers": "input_outliers",
    }

    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        return None

    def encode(self, packed: PackedCodes, activations: Grid | None) -> dict[str, Tensor]:
        found = {"weight_packed": packed.words, "weight_scale": packed.scale}
        if packed.kept is not None:
            found["weight_kept"] = packed.kept.words
        if packed.zero is not None:
            found["weight_zero_point"] = packed.zero
        if packed.group_index is not None:
            found["weight_g_idx"] = packed.group_index
        if packed.shared is not None:
            found["weight_scale_shared"] = packed.shared
        return found

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        words = tensors["weight_packed"]
        kept = None if scheme.sparsity is None else _kept(tensors, scheme)
        assert scheme.width is not None
        shape = (words.shape[0], scheme.width) if kept is None else kept.shape
        packed = PackedCodes(
            words, tensors["weight_scale"], tensors.get("weight_zero_point"), scheme.coded, scheme.group_size,
            shape, tensors.get("weight_g_idx"), tensors.get("weight_scale_shared"), kept,
        )  # fmt: skip
        storage = packed.scale.dtype
        wanted = PackedCodes.empty(
            scheme.coded, scheme.group_size, shape, scheme.symmetric, scheme.indexed, storage, scheme.sparsity,
            scheme.float_zeros,
        )  # fmt: skip
        for name, tensor in self.encode(wanted, scheme.activations).items():
            _check(name, tensors[name], tuple(tensor.shape), tensor.dtype)
        return packed

    def encode_floats(self, weight: SparseWeight) -> dict[str, Tensor]:
        return {"weight_values": weight.values, "weight_kept": weight.kept.words}

    def decode_floats(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> SparseWeight:
        values, kept = tensors["weight_values"], _kept(tensors, scheme)
        if not values.is_floating_point():
            raise ValueError(f"weight_values holds {values.dtype}, not floats")
        _check("weight_values", values, kept.sparsity.values(kept.shape), values.dtype)
        return SparseWeight(values, kept)

    def config(
        self, schemes: Mapping[str, Scheme], ignore: list[str], version: str, cached: CacheScheme | None = None
    ) -> dict[str, Any] | None:
        layers = {name: scheme.to_json() for name, scheme in schemes.items()}
        return {"quant_method": "compress", "version": version, "layers": layers} if layers else None

    def schemes(self, config: Mapping[str, Any], names: list[str]) -> dict[str, Scheme]:
        return {name: Scheme.from_json(layer) for name, layer in config["layers"].items()}


def _kept(tensors: Mapping[str, Tensor], scheme: Scheme) -> Kept:
    """Where the kept weights stand. Raises ValueError when that contradicts itself or the config."""
    words, sparsity, width = tensors["weight_kept"], scheme.sparsity, scheme.width
    assert sparsity is not None
    assert width is not None
    rows = words.shape[0] if words.ndim else 0
    _check("weight_kept", words, (rows, sparsity.words(width)), torch.int32)
    if sparsity.n_of_m is not None and sparsity != (regular := Sparsity.regular((rows, width), *sparsity.n_of_m)):
        raise ValueError(
            f"weight_kept holds {rows} rows of {width} columns, of which {sparsity.text} keeps {regular.kept} weights; "
            f"the config says {sparsity.kept}"
        )
    kept = Kept(words, sparsity, (rows, width))
    kept.check("weight_kept")
    return kept


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError when a tensor has another shape or dtype than it must have."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, but it must be {dtype} {list(shape)}")
