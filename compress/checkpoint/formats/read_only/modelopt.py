"""The format `modelopt`: FP8 and NVFP4 of NVIDIA Model Optimizer.

    FP8:   <m>.weight          float8_e4m3fn [O, I]
           <m>.weight_scale    one number; [O] per row; [O/128, I/128] or [O/128, 1, I/128, 1] per block of 128 x 128
           <m>.input_scale     one number with static inputs
    NVFP4: <m>.weight          uint8 [O, I/2]          two E2M1 codes per byte, the even column in the low half
           <m>.weight_scale    float8_e4m3fn [O, I/16]
           <m>.weight_scale_2  one number, float32     the reciprocal of weight_global_scale in compressed-tensors
           <m>.input_scale     one number          the reciprocal of input_global_scale; none with inputs in 16 bits
    both:  <attention>.k_proj.k_scale, v_proj.v_scale  scales of a rounded KV cache

    hf_quant_config.json: {producer, quantization: {quant_algo, kv_cache_quant_algo, group_size, exclude_modules}}
    config.json: quantization_config = {quant_method: modelopt, quant_algo, ignore, kv_cache_scheme, config_groups}

FP8: W ~ weight * weight_scale. NVFP4: W ~ E2M1(code) * weight_scale * weight_scale_2. A linear with a scale is
quantized, all others are dense. The scales of the KV cache are not applied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.checkpoint.formats.accepted import (
    INTEGER,
    NULL,
    OBJECT,
    TEXT,
    TEXTS,
    UNUSED,
    Accepted,
    only,
    without_effect,
)
from compress.checkpoint.formats.layouts.float_quantized import FloatQuantized
from compress.checkpoint.formats.layouts.nvfp4_pack_quantized import NVFP4PackQuantized
from compress.checkpoint.formats.read_only.reader import ReadOnly, input_scale, scalar
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.numerics.quant.grids import GRIDS

BYTES, HALVES = FloatQuantized(), NVFP4PackQuantized()
FP8, NVFP4 = GRIDS["fp8_e4m3"], GRIDS["nvfp4"]
GROUP = 16
BLOCK = 128
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "fp8_pb_wo", "NVFP4", "MIXED_PRECISION")


class ModelOpt(ReadOnly):
    """The `modelopt` format."""

    name = "modelopt"
    quant_method = "modelopt"
    keys: ClassVar[Mapping[str, Accepted]] = {
        "quant_method": TEXT,
        "quant_algo": only(*ALGORITHMS),
        "kv_cache_quant_algo": only("FP8", None),
        "kv_cache_scheme": OBJECT | NULL,
        "group_size": INTEGER | NULL,
        "has_zero_point": UNUSED,
        "pre_quant_scale": UNUSED,
        "config_groups": OBJECT | NULL,
        "quantized_layers": OBJECT | NULL,
        **dict.fromkeys(("ignore", "exclude_modules"), TEXTS | NULL),
        **without_effect("producer"),
    }

    @property
    def unverified(self) -> str:
        return "transformers does not read format modelopt"

    def left_out(self, names: Collection[str]) -> list[str]:
        ends = {"k_scale": "the KV cache", "v_scale": "the KV cache"}
        found = {text for name in names for leaf, text in ends.items() if name.endswith(f".{leaf}")}
        return [f"scales of {text} are left out, so it is not rounded" for text in sorted(found)]

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        per_token = config.get("quant_algo") == "FP8_PER_CHANNEL_PER_TOKEN"
        schemes = {}
        for name, shape in shapes.items():
            scale, weight = stored.get(f"{name}.weight_scale"), stored.get(f"{name}.weight")
            if f"{name}.weight_scale_2" in stored or (scale is not None and weight == (shape[0], shape[1] // 2)):
                inputs = (RoundingScheme(NVFP4, "local", group=GROUP),) if f"{name}.input_scale" in stored else ()
                schemes[name] = LayerScheme(shape, (CodesScheme(NVFP4, GROUP),), inputs)
            elif scale is not None:
                static = f"{name}.input_scale" in stored
                inputs = (RoundingScheme(FP8, "static" if static else "token"),) if static or per_token else ()
                schemes[name] = LayerScheme(shape, (_codes(name, scale, shape),), inputs)
        return schemes

    def readable(self, scheme: LayerScheme) -> Collection[str]:
        return ("weight", "weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        (codes,), rounding = scheme.all_codes, scheme.rounding
        if codes.grid is NVFP4:
            return [_halves(tensors, scheme)], _local_inputs(tensors, scheme)
        specs = BYTES.tensors(scheme)
        scale = tensors["weight_scale"]
        scale = scale.reshape(specs["weight_scale"].shape) if scale.numel() else scale
        stored = checked({"weight": specs["weight"]}, tensors, "")
        stored |= checked({"weight_scale": specs["weight_scale"]}, {"weight_scale": scale}, "")
        if rounding is None:
            return [BYTES.decode(stored, scheme)], []
        static = {"scale": input_scale("input_scale", tensors)} if rounding.scale == "static" else {}
        return [BYTES.decode(stored, scheme)], [InputRounding(rounding, scheme.shape, static)]


def _codes(name: str, scale: Sequence[int], shape: tuple[int, int]) -> CodesScheme:
    """Return the scheme of FP8 weights by the shape of their scale. Raises ValueError for another one."""
    rows, width = shape
    sizes = [size for size in scale if size != 1]
    if not sizes:
        return CodesScheme(FP8, "tensor")
    if list(scale) in ([rows], [rows, 1]):
        return CodesScheme(FP8, "channel")
    blocks = [-(-rows // BLOCK), -(-width // BLOCK)]
    if list(scale) in (blocks, [blocks[0], 1, blocks[1], 1]) and width % BLOCK == 0:
        return CodesScheme(FP8, BLOCK, rows=BLOCK)
    raise ValueError(f"{name}.weight_scale is {list(scale)}, which no layout of FP8 has for a weight {rows} x {width}")


def _halves(tensors: Mapping[str, Tensor], scheme: LayerScheme) -> WeightPart:
    """Decode NVFP4 weights."""
    (rows, width), global_name = scheme.shape, "weight_scale_2"
    if width % GROUP:
        raise ValueError(f"weight is in groups of {GROUP} columns, which do not divide {width} inputs")
    specs = {
        "weight": TensorSpec((rows, width // 2), torch.uint8),
        "weight_scale": TensorSpec((rows, width // GROUP), torch.float8_e4m3fn),
    }
    stored = checked(specs, tensors, "")
    shared = checked({global_name: TensorSpec((1,))}, {global_name: scalar(global_name, tensors[global_name])}, "")
    multiplier = shared[global_name].float()
    if not bool((multiplier > 0).all() and multiplier.isfinite().all()):
        raise ValueError(f"{global_name} is {float(multiplier)}, but it must be positive and finite")
    packed = {"weight_packed": stored["weight"], "weight_scale": stored["weight_scale"]}
    return HALVES.decode({**packed, "weight_global_scale": multiplier.reciprocal()}, scheme)


def _local_inputs(tensors: Mapping[str, Tensor], scheme: LayerScheme) -> list[InputRounding]:
    """Decode the quantization of NVFP4 inputs, if there is one."""
    if scheme.rounding is None:
        return []
    shared = input_scale("input_scale", tensors).float().reciprocal()
    return [InputRounding(scheme.rounding, scheme.shape, {"shared": shared})]
