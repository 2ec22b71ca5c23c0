"""Our own format: every grid, any group size (short last group included), groups by column index.

    <m>.weight_packed       int32 [O, ceil(I*b/32)]   unsigned codes, a dense bit stream along the input axis, least
                                                      significant bit first (q - lowest; level index; bit pattern)
    <m>.weight_scale        float [O, G]              [1, 1] per tensor; uint8 where the grid stores scales in a byte:
                                                      mxfp4 an exponent 2^(e-127); nvfp4 the bits of an 8-bit float
                                                      (e4m3); nf4_dq a byte, times the step of its block
    <m>.weight_scale_shared float32 [n]               nvfp4: [1], by which scales are divided; nf4_dq: the mean scale,
                                                      then the step of every 256 scales, row by row:
                                                      scale = mean + (byte - 128) * step
    <m>.weight_zero_point   int8  [O, G]              only with zero points
    <m>.weight_g_idx        int32 [I]                 only with a group index
    <m>.input_channel_scale float32 [I]               inputs are divided by it first; only where a scale stayed there
    <m>.input_scale         float [1]                 only with a static scale of the (divided) inputs' grid
    <m>.input_outliers      bool [I]                  columns whose inputs are not rounded; only where calibrated
    config.json: quantization_config = {quant_method: compress, version, layers: {name: {grid, group_size,
                 symmetric, indexed, activations, width}}}, and where they are not the usual: activation_scale
                 (static), outlier_threshold, outlier_columns, input_scaled

Read by `compress.load` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from compress.formats.base import Format, Scheme
from compress.numerics.grids import Grid
from compress.numerics.packed import PackedCodes


class Native(Format):
    """The `native` format."""

    name = "native"
    input_names = {
        "input_scale": "input_channel_scale",
        "activation_scale": "input_scale",
        "outliers": "input_outliers",
    }

    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        return None

    def encode(self, packed: PackedCodes, activations: Grid | None) -> dict[str, Tensor]:
        found = {"weight_packed": packed.words, "weight_scale": packed.scale}
        if packed.zero is not None:
            found["weight_zero_point"] = packed.zero
        if packed.group_index is not None:
            found["weight_g_idx"] = packed.group_index
        if packed.shared is not None:
            found["weight_scale_shared"] = packed.shared
        return found

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        words = tensors["weight_packed"]
        assert scheme.width is not None
        return PackedCodes(
            words, tensors["weight_scale"], tensors.get("weight_zero_point"), scheme.grid, scheme.group_size,
            (words.shape[0], scheme.width), tensors.get("weight_g_idx"), tensors.get("weight_scale_shared"),
        )  # fmt: skip

    def config(self, schemes: Mapping[str, Scheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        layers = {name: scheme.to_json() for name, scheme in schemes.items()}
        return {"quant_method": "compress", "version": version, "layers": layers} if layers else None

    def schemes(self, config: Mapping[str, Any], names: list[str]) -> dict[str, Scheme]:
        return {name: Scheme.from_json(layer) for name, layer in config["layers"].items()}
