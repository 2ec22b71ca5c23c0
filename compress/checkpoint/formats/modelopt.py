"""The format `modelopt`: FP8, MXFP8 and NVFP4 as NVIDIA Model Optimizer writes them for TensorRT-LLM and other servers.

    FP8:   <m>.weight          float8_e4m3fn [O, I]
           <m>.weight_scale    float32: one number; [O] per row; [ceil(O/128), 1, I/128, 1] per block of 128 x 128
           <m>.input_scale     one number, float32, with static inputs
    MXFP8: <m>.weight          float8_e4m3fn [O, I]
           <m>.weight_scale    uint8 [O, I/32]         exponents e; the scale of 32 columns is 2^(e - 127)
    NVFP4: <m>.weight          uint8 [O, I/2]          two E2M1 codes per byte, the even column in the low half
           <m>.weight_scale    float8_e4m3fn [O, I/16]
           <m>.weight_scale_2  one number, float32     the reciprocal of weight_global_scale in compressed-tensors
           <m>.input_scale     one number, float32     the reciprocal of input_global_scale; none with inputs in 16 bits
    read only: <attention>.k_proj.k_scale, v_proj.v_scale   scales of a rounded KV cache, which are not applied

    hf_quant_config.json: {producer, quantization: {quant_algo, kv_cache_quant_algo, group_size, exclude_modules}}
    config.json: quantization_config = {quant_method: modelopt, quant_algo, ignore, config_groups, producer}

FP8: W ~ weight * weight_scale. NVFP4: W ~ E2M1(code) * weight_scale * weight_scale_2. A linear with a scale is
quantized, all others are dense. `quant_algo` names one scheme of all layers; layers of several schemes have
MIXED_PRECISION, and `quantized_layers` states the scheme of each.

A global scale is stored as its reciprocal, from which not every number can be computed again in float32. The nearest
number that can is used instead: it differs by at most one unit in the last place.

Servers skip a module if its name contains an excluded one, or matches it as a pattern of the shell. The name of a dense
module that is the beginning of a quantized one (`mlp.gate`, `mlp.gate_proj`) is therefore written as a pattern
(`mlp.gat[e]`).
"""

from __future__ import annotations

import json
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
from compress.checkpoint.formats.base import Format, refuses_all_but_codes
from compress.checkpoint.formats.layouts.float_quantized import FloatQuantized
from compress.checkpoint.formats.layouts.layout import Layout, codes_of
from compress.checkpoint.formats.layouts.mxfp8_quantized import MXFP8Quantized
from compress.checkpoint.formats.layouts.nvfp4_pack_quantized import NVFP4PackQuantized
from compress.checkpoint.formats.read_only.reader import input_scale, scalar
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme, find_rounding, only_codes
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.numerics.quant.grids import GRIDS

BYTES, EXPONENTS, HALVES = FloatQuantized(), MXFP8Quantized(), NVFP4PackQuantized()
FP8, MXFP8, NVFP4 = GRIDS["fp8_e4m3"], GRIDS["mxfp8"], GRIDS["nvfp4"]
LAYOUTS: Mapping[str, Layout] = {FP8.name: BYTES, MXFP8.name: EXPONENTS, NVFP4.name: HALVES}
GROUP = 16
BLOCK = 128
IN_BLOCKS = "fp8_pb_wo"  # the spelling of Model Optimizer and TensorRT-LLM
IN_ROWS = "FP8_PER_CHANNEL_PER_TOKEN"
MIXED = "MIXED_PRECISION"
IN_16_BITS = "W4A16_NVFP4"
ALGORITHMS = ("FP8", IN_ROWS, IN_BLOCKS, IN_BLOCKS.upper(), "MXFP8", "NVFP4", IN_16_BITS, MIXED)
IN_TENSORS = "weight_scale_2"
"""The stored reciprocal of the number that all scales of NVFP4 share."""
FILE = "hf_quant_config.json"
STORED_AS = (
    "FP8 (fp8_e4m3 per tensor with a static activation scale, per channel with inputs per token, or in blocks of "
    "128 x 128 with activations: none), MXFP8 with mxfp8 inputs, and nvfp4 with nvfp4 inputs and a static global scale "
    "or with activations: none"
)


class ModelOpt(Format):
    """The `modelopt` format."""

    name = "modelopt"
    quant_method = "modelopt"
    served = True
    fused = True
    scale_dtype = torch.float32
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

    def left_out(self, names: Collection[str], config: Mapping[str, Any]) -> list[str]:
        kinds = [key for key in ("kv_cache_quant_algo", "kv_cache_scheme") if config.get(key)]
        has_scales = any(name.endswith((".k_scale", ".v_scale")) for name in names)
        kinds += ["scales of the KV cache"] if has_scales else []
        return [f"left out: {', '.join(kinds)}; the KV cache is not rounded"] if kinds else []

    def refuses(self, scheme: LayerScheme) -> str | None:
        reason = refuses_all_but_codes(scheme, f"format {self.name}")
        if reason is not None or scheme.codes is None:
            return reason
        if _algorithm(scheme) is None:
            return f"format {self.name} holds {STORED_AS}, not {scheme.text}; use one of them, or another format"
        width, size = scheme.shape[1], scheme.codes.group_size
        if isinstance(size, int) and width % size:
            name = scheme.codes.grid.name
            return f"{name} has groups of {size} columns, which do not divide the {width} inputs; use format: native"
        return None

    def adapt_part(self, part: WeightPart) -> WeightPart:
        codes = only_codes([part])
        if codes is None or codes.shared is None:
            return part
        return codes.changed(shared=_invertible(codes.shared))

    def adapt_transform(self, transform: InputTransform) -> InputTransform:
        rounding = find_rounding([transform])
        if rounding is None:
            return transform
        scale, shared = rounding.scale, rounding.shared
        stored = {
            "scale": None if scale is None else scale.float(),
            "shared": None if shared is None else _invertible(shared),
        }
        return InputRounding(rounding.scheme, rounding.shape, stored)

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        (rows, width), codes, number = scheme.shape, codes_of(scheme), TensorSpec((), torch.float32)
        specs = {"weight": TensorSpec(scheme.shape, torch.float8_e4m3fn)}
        if codes.grid is NVFP4:
            scales = HALVES.tensors(scheme)["weight_scale"]
            specs = {"weight": TensorSpec((rows, width // 2), torch.uint8), "weight_scale": scales, IN_TENSORS: number}
        elif codes.grid is MXFP8:
            specs["weight_scale"] = EXPONENTS.tensors(scheme)["weight_scale"]
        elif codes.group_size == "tensor":
            specs["weight_scale"] = number
        else:
            shape = (rows,) if codes.rows == 1 else (-(-rows // BLOCK), 1, width // BLOCK, 1)
            specs["weight_scale"] = TensorSpec(shape, torch.float32)
        if scheme.rounding is not None and scheme.rounding.scale in ("static", "local"):
            specs["input_scale"] = number
        return specs

    def units(self, scheme: LayerScheme) -> tuple[int, int]:
        codes = codes_of(scheme)
        return LAYOUTS[codes.grid.name].units(codes)

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        part, rounding, specs = only_codes(parts), find_rounding(transforms), self.tensors(scheme)
        assert part is not None, "refuses was not asked"
        stored = dict(LAYOUTS[part.grid.name].encode(part))
        if part.grid is NVFP4:
            stored["weight"] = stored.pop("weight_packed")
            stored[IN_TENSORS] = stored.pop("weight_global_scale").reciprocal()
        if rounding is not None and rounding.scale is not None:
            stored["input_scale"] = rounding.scale
        if rounding is not None and rounding.shared is not None:
            stored["input_scale"] = rounding.shared.reciprocal()
        return {name: stored[name].reshape(spec.shape) for name, spec in specs.items()}

    def readable(self, scheme: LayerScheme) -> Collection[str]:
        return ("weight", "weight_scale", IN_TENSORS, "input_scale", "k_scale", "v_scale")

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        (codes,), rounding = scheme.all_codes, scheme.rounding
        if codes.grid is NVFP4:
            return [_halves(tensors, scheme)], _local_inputs(tensors, scheme)
        layout = LAYOUTS[codes.grid.name]
        specs = layout.tensors(scheme)
        scale = tensors["weight_scale"]
        scale = scale.reshape(specs["weight_scale"].shape) if scale.numel() and codes.grid is FP8 else scale
        stored = checked({"weight": specs["weight"]}, tensors, "")
        stored |= checked({"weight_scale": specs["weight_scale"]}, {"weight_scale": scale}, "")
        if rounding is None:
            return [layout.decode(stored, scheme)], []
        static = {"scale": input_scale("input_scale", tensors)} if rounding.scale == "static" else {}
        return [layout.decode(stored, scheme)], [InputRounding(rounding, scheme.shape, static)]

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        if not schemes:
            return None
        algorithms = {name: _algorithm(scheme) for name, scheme in schemes.items()}
        groups: dict[str, list[str]] = {}
        for name, algorithm in algorithms.items():
            groups.setdefault(str(algorithm), []).append(name)
        single = len(groups) == 1
        settings: dict[str, Any] = {
            "quant_method": self.quant_method,
            "quant_algo": next(iter(groups)) if single else MIXED,
            "ignore": _excluded(ignore, schemes),
            "config_groups": {
                f"group_{i}": {"targets": ["Linear"] if single else names, **_group(schemes[names[0]])}
                for i, names in enumerate(groups.values())
            },
            "producer": {"name": "compress", "version": version},
        }
        if not single:
            settings["quantized_layers"] = {
                name: {"quant_algo": str(algorithm), **_size(schemes[name])} for name, algorithm in algorithms.items()
            }
        return settings

    def files(self, quantization: Mapping[str, Any] | None) -> dict[str, str]:
        if quantization is None:
            return {}
        sizes = [group["weights"]["group_size"] for group in quantization["config_groups"].values()]
        quantized = quantization.get("quantized_layers")
        stated = {
            "quant_algo": quantization["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": sizes[0] if len(sizes) == 1 else None,
            "exclude_modules": quantization["ignore"],
            **({} if quantized is None else {"quantized_layers": quantized}),
        }
        return {FILE: json.dumps({"producer": quantization["producer"], "quantization": stated}, indent=2) + "\n"}

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        schemes = {}
        for name, shape in shapes.items():
            scale, weight = stored.get(f"{name}.weight_scale"), stored.get(f"{name}.weight")
            algorithm, is_static = _stated_algorithm(config, name), f"{name}.input_scale" in stored
            if f"{name}.{IN_TENSORS}" in stored or (scale is not None and weight == (shape[0], shape[1] // 2)):
                inputs = (RoundingScheme(NVFP4, "local", group=GROUP),) if is_static else ()
                schemes[name] = LayerScheme(shape, (CodesScheme(NVFP4, GROUP),), inputs)
            elif scale is not None and algorithm == "MXFP8":
                size = MXFP8.group_size
                assert size is not None
                codes = CodesScheme(MXFP8, size)
                schemes[name] = LayerScheme(shape, (codes,), (RoundingScheme(MXFP8, "group", group=size),))
            elif scale is not None:
                kind = "static" if is_static else "token"
                inputs = (RoundingScheme(FP8, kind),) if is_static or algorithm == IN_ROWS else ()
                schemes[name] = LayerScheme(shape, (_codes(name, scale, shape, algorithm),), inputs)
            if name in schemes and algorithm is not None:
                _check_stated(name, algorithm, schemes[name])
        return schemes


def _algorithm(scheme: LayerScheme) -> str | None:
    """Return the `quant_algo` of a layer; None if there is none."""
    codes, rounding = codes_of(scheme), scheme.rounding
    inputs = None if rounding is None else (rounding.grid.name, rounding.scale, rounding.group, rounding.symmetric)
    size = codes.group_size if codes.rows == 1 else (codes.rows, codes.group_size)
    if codes.float_zeros or codes.indexed or not codes.symmetric:
        return None
    return {
        (FP8.name, "tensor", (FP8.name, "static", None, True)): "FP8",
        (FP8.name, "channel", (FP8.name, "token", None, True)): IN_ROWS,
        (FP8.name, (BLOCK, BLOCK), None): IN_BLOCKS,
        (MXFP8.name, 32, (MXFP8.name, "group", 32, True)): "MXFP8",
        (NVFP4.name, GROUP, (NVFP4.name, "local", GROUP, True)): "NVFP4",
        (NVFP4.name, GROUP, None): IN_16_BITS,
    }.get((codes.grid.name, size, inputs))


def _stated_algorithm(config: Mapping[str, Any], name: str) -> Any:
    """Return the `quant_algo` that a config states for a linear."""
    if config.get("quant_algo") != MIXED:
        return config.get("quant_algo")
    layer = (config.get("quantized_layers") or {}).get(name)
    return layer.get("quant_algo") if isinstance(layer, Mapping) else None


def _check_stated(name: str, algorithm: Any, scheme: LayerScheme) -> None:
    """Raise ValueError for a `quant_algo` that states another scheme than the tensors of a linear."""
    actual = _algorithm(scheme)
    if algorithm == "NVFP4" and actual == IN_16_BITS:  # its name before there was another one
        return
    if actual is None or actual.upper() != str(algorithm).upper():
        inputs = "with rounded inputs" if scheme.rounding is not None else "with inputs in floating point"
        raise ValueError(
            f"quant_algo is {algorithm}, but the tensors of {name} are those of {actual or 'no algorithm'}: "
            f"{scheme.text}, {inputs}"
        )


def _size(scheme: LayerScheme) -> dict[str, int]:
    """Return the group size of a layer, if its scheme has one."""
    size = codes_of(scheme).group_size
    return {"group_size": size} if isinstance(size, int) and codes_of(scheme).rows == 1 else {}


def _group(scheme: LayerScheme) -> dict[str, Any]:
    """Return the entry of `config_groups` for layers of one scheme."""
    codes, rounding = codes_of(scheme), scheme.rounding
    common = {"num_bits": codes.grid.bits, "type": "float", "group_size": _size(scheme).get("group_size")}
    strategy = {} if codes.group_size != "channel" else {"strategy": "channel"}
    weights = {"dynamic": False, **common, **strategy}
    inputs = None if rounding is None else {"dynamic": rounding.scale in ("token", "group"), **common}
    return {"weights": weights, "input_activations": inputs}


def _excluded(names: Sequence[str], compressed: Collection[str]) -> list[str]:
    """Return the names of dense modules as patterns that mean no quantized module.

    Args:
        names: as of `Format.config`.
        compressed: names of the compressed layers.
    """
    entries = []
    for name in names:
        if name.endswith("."):
            entries.append(f"{name[:-1]}*")
        elif any(name in quantized for quantized in compressed):
            entries.append(f"{name[:-1]}[{name[-1]}]")
        else:
            entries.append(name)
    return entries


def _invertible(scale: Tensor) -> Tensor:
    """Return the number that the reciprocal of a global scale is read as."""
    return scale.float().reciprocal().reciprocal()


def _codes(name: str, scale: Sequence[int], shape: tuple[int, int], algorithm: Any) -> CodesScheme:
    """Return the scheme of FP8 weights by the shape of their scale. Raises ValueError for another one.

    Args:
        name: of the linear, for the message.
        scale: shape of its scale.
        shape: (out, in) of the linear.
        algorithm: its `quant_algo`, which decides for weights with one scale.
    """
    rows, width = shape
    blocks = [-(-rows // BLOCK), -(-width // BLOCK)]
    fits_blocks = list(scale) in (blocks, [blocks[0], 1, blocks[1], 1]) and width % BLOCK == 0
    fits_rows = list(scale) in ([rows], [rows, 1])
    if fits_blocks and str(algorithm).lower() == IN_BLOCKS:
        return CodesScheme(FP8, BLOCK, rows=BLOCK)
    if all(size == 1 for size in scale) and not (fits_rows and algorithm == IN_ROWS):
        return CodesScheme(FP8, "tensor")
    if fits_rows:
        return CodesScheme(FP8, "channel")
    if fits_blocks:
        return CodesScheme(FP8, BLOCK, rows=BLOCK)
    raise ValueError(f"{name}.weight_scale is {list(scale)}, which no layout of FP8 has for a weight {rows} x {width}")


def _halves(tensors: Mapping[str, Tensor], scheme: LayerScheme) -> WeightPart:
    """Decode NVFP4 weights."""
    (rows, width), global_name = scheme.shape, IN_TENSORS
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
