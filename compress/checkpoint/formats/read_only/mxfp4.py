"""The format `mxfp4`: experts in MXFP4, all of a block in one tensor.

    <experts>.<p>_blocks   uint8 [E, O, I/32, 16]   two E2M1 codes per byte, the even column in the low half
    <experts>.<p>_scales   uint8 [E, O, I/32]       exponents e; the scale of 32 columns is 2^(e - 127)
    <experts>.<p>_bias     float [E, O]
    config.json: quantization_config = {quant_method: mxfp4, modules_to_not_convert}

p is gate_up_proj or down_proj. W ~ E2M1(code) * 2^(e - 127), as in `mxfp4-pack-quantized`. All other layers are dense.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils.quantization_config import Mxfp4Config

from compress.checkpoint.formats import STACKED
from compress.checkpoint.formats.accepted import NULL, TEXT, TEXTS, Accepted, without_effect
from compress.checkpoint.formats.layouts.mxfp4_pack_quantized import MXFP4PackQuantized
from compress.checkpoint.formats.read_only.reader import ReadOnly
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.grids import GRIDS

LAYOUT = MXFP4PackQuantized()
GROUP = 32


class MXFP4(ReadOnly):
    """The `mxfp4` format."""

    name = "mxfp4"
    quant_method = "mxfp4"
    stacked: ClassVar[Mapping[str, str]] = STACKED[quant_method]
    keys: ClassVar[Mapping[str, Accepted]] = {
        "quant_method": TEXT,
        "modules_to_not_convert": TEXTS | NULL,
        **without_effect("dequantize"),
    }

    @property
    def loading(self) -> dict[str, Any]:
        return {"quantization_config": Mxfp4Config(dequantize=True)}

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        codes = CodesScheme(GRIDS["mxfp4"], GROUP)
        names = [name for name in shapes if f"{name}.blocks" in stored or f"{name}.scales" in stored]
        if uneven := [name for name in names if shapes[name][1] % GROUP]:
            raise ValueError(f"{uneven[0]} has {shapes[uneven[0]][1]} inputs, which are no multiple of {GROUP}")
        return {name: LayerScheme(shapes[name], (codes,)) for name in names}

    def readable(self, scheme: LayerScheme) -> Collection[str]:
        return ("blocks", "scales")

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        rows, width = scheme.shape
        groups = width // GROUP
        specs = {"blocks": (rows, groups, GROUP // 2), "scales": (rows, groups)}
        stored = checked({name: TensorSpec(shape, torch.uint8) for name, shape in specs.items()}, tensors, "")
        packed = {"weight_packed": stored["blocks"].reshape(rows, width // 2), "weight_scale": stored["scales"]}
        return [LAYOUT.decode(packed, scheme)], []
