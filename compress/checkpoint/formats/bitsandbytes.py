"""The format `bitsandbytes`, as transformers stores it: LLM.int8, and 4-bit nf4 and fp4.

    8 bits:  <m>.weight        int8  [O, I]    codes
             <m>.SCB           float [O]       127 * scale, float32
             <m>.weight_format uint8 []        0: rows one after the other
    4 bits:  <m>.weight        uint8 [O*I/2, 1]  two codes per byte, row by row, the FIRST one in the high half; the
                                   same bytes in another dtype with bnb_4bit_quant_storage, [O*I/2/bytes of it, 1]
             <m>.weight.absmax     float32 [O*I/block] scales; uint8 with double quantization
             <m>.weight.quant_map  float32 [16]        the value of each code
             <m>.weight.quant_state.bitsandbytes__nf4 (or __fp4)  uint8 [n]: JSON {quant_type, blocksize, dtype, shape,
                                   and nested_blocksize: 256, nested_dtype, nested_offset with double quantization}
             <m>.weight.nested_absmax float32 [ceil(O*I/block/256)], <m>.weight.nested_quant_map float32 [256]
    config.json: quantization_config = {quant_method: bitsandbytes, load_in_8bit or load_in_4bit,
        llm_int8_threshold, llm_int8_skip_modules: [dense modules], bnb_4bit_quant_type, bnb_4bit_use_double_quant, ...}

8 bits: W ~ code * SCB / 127; the inputs are rounded to int8 per token, except columns that reach the threshold (0: no
such columns). 4 bits: W ~ quant_map[code] * absmax, with absmax = nested_quant_map[byte] * nested_absmax[block / 256] +
nested_offset with double quantization. Blocks run over the flattened weight, so they are groups of columns if the block
size divides the inputs. The codes of fp4 are bit patterns, not sorted; those of our grid are sorted. The text of
quant_state is padded with spaces to a length that does not depend on its numbers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from compress.checkpoint.formats.accepted import FLAG, NOT_NEGATIVE, NULL, TEXT, UNUSED, Accepted, only, without_effect
from compress.checkpoint.formats.base import Format, refuses_embeddings, unstated_rounding
from compress.checkpoint.formats.layouts.layout import codes_of
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme, only_codes
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.numerics.division import divided
from compress.numerics.dtypes import dtype_name
from compress.numerics.quant.bits import pack, unpack
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import FP4_BNB_LEVELS, GRIDS, NF4_LEVELS, Grid
from compress.numerics.quant.scales import DynamicDoubleScale, dynamic_levels

INT8 = GRIDS["int8"]
HIGHEST = 127
FLOATS = {("nf4", False): "nf4", ("nf4", True): "nf4_bnb_dq", ("fp4", False): "fp4_bnb", ("fp4", True): "fp4_bnb_dq"}
"""The grid of 4-bit weights by quant_type and double quantization."""
KINDS = {GRIDS[grid]: kind for kind, grid in FLOATS.items()}
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED = DynamicDoubleScale().block
OFFSET = 24  # characters of nested_offset
LARGEST_STATE = 1 << 12  # bytes; bitsandbytes writes less than 200
# The code of each sorted level of fp4: bit patterns of sign, exponent and mantissa. Zero has a second code, 8.
FP4_CODES = (11, 10, 13, 12, 15, 14, 9, 0, 1, 6, 7, 4, 5, 2, 3)
STATE = "weight.quant_state.bitsandbytes__"


@dataclass(frozen=True)
class BitsAndBytes(Format):
    """The `bitsandbytes` format. dtype: in which readers dequantize 4-bit weights, and compute."""

    name = "bitsandbytes"
    quant_method = "bitsandbytes"
    served = True
    scale_dtype = torch.float32
    keys: ClassVar[Mapping[str, Accepted]] = {
        "quant_method": TEXT,
        **dict.fromkeys(("load_in_8bit", "load_in_4bit", "_load_in_8bit", "_load_in_4bit"), FLAG),
        "llm_int8_threshold": NOT_NEGATIVE | NULL,
        "llm_int8_has_fp16_weight": UNUSED,
        "bnb_4bit_quant_type": only("nf4", "fp4"),
        "bnb_4bit_use_double_quant": FLAG,
        "bnb_4bit_quant_storage": only("uint8", "int8", "float16", "bfloat16", "float32", "float64", None),
        **without_effect("llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "bnb_4bit_compute_dtype"),
    }

    dtype: torch.dtype = torch.float32

    def stored_in(self, storage: torch.dtype) -> BitsAndBytes:
        return BitsAndBytes(storage)

    @property
    def unverified(self) -> str:
        return "transformers reads format bitsandbytes with the package bitsandbytes, which runs do not use"

    def unsplit(self) -> str:
        return "vLLM does not split checkpoints of bitsandbytes over devices (their blocks run over the whole weight)"

    def refuses(self, scheme: LayerScheme) -> str | None:
        if scheme.plain:
            return None
        format_name, codes = f"format {self.name}", scheme.codes
        ends = refuses_embeddings(scheme, format_name)
        if ends is not None:
            return ends
        if scheme.maps_inputs is not None:
            mapped = scheme.maps_inputs
            return f"{mapped.effect}, and {format_name} cannot state this; use format: native{mapped.instead}"
        if codes is None:
            return f"{format_name} holds only codes, not {scheme.text}; use format: native"
        if codes.grid is INT8:
            return self._refuses_int8(scheme, codes)
        if codes.grid not in KINDS:
            grids = ", ".join(FLOATS.values())
            return (
                f"{format_name} holds weights int8, {grids}, not {codes.grid.name}; use one of them, or format: native"
            )
        if scheme.rounding is not None:
            return unstated_rounding(scheme.rounding, f"{format_name} with 4-bit weights")
        if codes.indexed:
            return f"{format_name} has no group index; use act_order: static, or format: native"
        size, width = codes.group_size, scheme.shape[1]
        if size not in BLOCKS or width % int(size):
            supported = ", ".join(str(block) for block in BLOCKS if width % block == 0)
            use = f"use {supported}, or format: native" if supported else "use format: native"
            return f"{format_name} has no blocks of {size} columns for {width} inputs; {use}"
        return None

    def _refuses_int8(self, scheme: LayerScheme, codes: CodesScheme) -> str | None:
        format_name, rounding = f"format {self.name}", scheme.rounding
        if codes.rows > 1:
            return f"{format_name} has no scales of blocks of rows; use block_rows: 1, or format: native"
        if codes.group_size not in ("channel", "tensor") or not codes.symmetric:
            return (
                f"{format_name} holds int8 weights with one scale per row, without zero points; use "
                "group_size: channel and symmetric: true, or format: native"
            )
        dynamic = rounding is not None and rounding.scale == "token" and rounding.symmetric and not rounding.columns
        dynamic = dynamic and rounding is not None and rounding.clip == 1 and rounding.groups is None
        if rounding is None or not dynamic or rounding.grid is not INT8:
            instead = "use the pass llm_int8, or activations: int8"
            if rounding is not None and rounding.grid is INT8:
                instead = "use the pass llm_int8" if rounding.scale == "token" else "use activation_scale: token"
            return (
                f"{format_name} rounds the inputs of int8 weights to int8 per token, with outlier columns found at run "
                f"time; {instead}, or format: native"
            )
        return None

    def clash(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        kinds = {name: _kind(scheme) for name, scheme in schemes.items()}
        if len(set(kinds.values())) > 1:
            grids = sorted({codes_of(scheme).grid.name for scheme in schemes.values()})
            difference = f"not {', '.join(grids)}" if len(grids) > 1 else "not several thresholds"
            return f"format {self.name} has one grid for all layers, {difference}; use one of them, or format: native"
        return None

    def adapt(self, scheme: LayerScheme) -> LayerScheme:
        codes = scheme.codes
        return scheme if codes is None else scheme.with_parts(_adapted(codes))

    def adapt_part(self, part: WeightPart) -> WeightPart:
        codes = only_codes([part])
        if codes is None or codes.grid is not INT8:
            return part
        scale = divided(codes.scale.float().mul(HIGHEST), HIGHEST)  # the scale that a reader gets from SCB
        return codes.changed(_adapted(codes.scheme), scale=scale.expand(part.shape[0], 1).contiguous())

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        codes, (rows, width) = codes_of(scheme), scheme.shape
        if codes.grid is INT8:
            return {
                "weight": TensorSpec((rows, width), torch.int8),
                "SCB": TensorSpec((rows,), torch.float32),
                "weight_format": TensorSpec((), torch.uint8),
            }
        kind, double = KINDS[codes.grid]
        assert isinstance(codes.group_size, int)
        blocks = rows * (width // codes.group_size)
        text = _state(scheme, self.dtype, 0.0 if double else None)
        specs = {
            "weight": TensorSpec((rows * width // 2, 1), torch.uint8),
            "weight.absmax": TensorSpec((blocks,), torch.uint8 if double else torch.float32),
            "weight.quant_map": TensorSpec((16,), torch.float32),
            f"{STATE}{kind}": TensorSpec((len(text),), torch.uint8),
        }
        if double:
            specs["weight.nested_absmax"] = TensorSpec((math.ceil(blocks / NESTED),), torch.float32)
            specs["weight.nested_quant_map"] = TensorSpec((256,), torch.float32)
        return specs

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        part = only_codes(parts)
        assert part is not None, "refuses was not asked"
        if part.grid is INT8:
            scale = part.scale.float().reshape(-1).mul(HIGHEST)
            return {"weight": part.codes().codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        kind, double = KINDS[part.grid]
        offset = float(part.shared[0]) if part.shared is not None else None
        text = torch.tensor(list(_state(scheme, self.dtype, offset)), dtype=torch.uint8)
        codes = _to_bnb(unpack(part.words, 4, part.shape[1]), kind).flatten()
        tensors = {
            "weight": (codes[0::2] << 4 | codes[1::2]).view(-1, 1),
            "weight.absmax": part.scale.flatten() if double else part.scale.float().flatten(),
            "weight.quant_map": _map(kind),
            f"{STATE}{kind}": text,
        }
        if part.shared is not None:
            tensors |= {"weight.nested_absmax": part.shared[1:], "weight.nested_quant_map": dynamic_levels()}
        return tensors

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        codes, (rows, width) = codes_of(scheme), scheme.shape
        specs = self.tensors(scheme)
        if codes.grid is INT8:
            if tensors.get("weight_format", torch.tensor(0)).tolist() not in (0, [0]):
                raise ValueError("weight_format is not 0; only rows one after the other can be read")
            del specs["weight_format"]
            stored = checked(specs, tensors, "")
            scale = divided(stored["SCB"], HIGHEST).view(-1, 1)
            part = CodesPart.of(Codes(stored["weight"], scale, None, INT8, "channel"))
            assert scheme.rounding is not None
            return [part], [InputRounding(scheme.rounding, scheme.shape, {})]
        kind, double = KINDS[codes.grid]
        text = tensors[f"{STATE}{kind}"]
        specs[f"{STATE}{kind}"] = TensorSpec(tuple(text.shape), torch.uint8)  # as long as its writer made it
        stored = checked(specs, {**tensors, "weight": _as_bytes(tensors["weight"])}, "")
        state = _read_state(text, scheme, kind)
        _check_map("weight.quant_map", stored["weight.quant_map"], _map(kind))
        stream = stored["weight"].flatten()
        unsigned = _from_bnb(torch.stack([stream >> 4, stream & 15], dim=-1).view(rows, width), kind)
        fields = {"words": pack(unsigned, 4), "scale": stored["weight.absmax"].view(rows, -1)}
        if double:
            _check_map("weight.nested_quant_map", stored["weight.nested_quant_map"], dynamic_levels())
            offset = torch.tensor([float(state["nested_offset"])], device=text.device)
            fields["shared"] = torch.cat([offset, stored["weight.nested_absmax"]])
        return [CodesPart(codes, scheme.shape, fields)], []

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        if not schemes:
            return None
        scheme = next(iter(schemes.values()))
        grid, rounding = codes_of(scheme).grid, scheme.rounding
        kind, double = KINDS.get(grid, ("fp4", False))
        return {
            "quant_method": self.quant_method,
            "load_in_8bit": grid is INT8,
            "load_in_4bit": grid is not INT8,
            "llm_int8_threshold": 6.0 if rounding is None else rounding.threshold or 0.0,
            "llm_int8_skip_modules": [name.rstrip(".") for name in ignore],
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": double,
            "bnb_4bit_compute_dtype": dtype_name(self.dtype),
            "bnb_4bit_quant_storage": "uint8",
        }

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        schemes = {}
        threshold = config.get("llm_int8_threshold", 6.0) or None
        rounding = RoundingScheme(INT8, "token", None if threshold is None else float(threshold))
        for name, shape in shapes.items():
            if f"{name}.SCB" in stored:
                _agree(config, ("load_in_8bit", True), ("load_in_4bit", False), name=name)
                schemes[name] = LayerScheme(shape, (CodesScheme(INT8, "channel"),), (rounding,))
            for kind in ("nf4", "fp4"):
                if f"{name}.{STATE}{kind}" in stored:
                    double = f"{name}.weight.nested_absmax" in stored
                    states = ("bnb_4bit_quant_type", kind), ("bnb_4bit_use_double_quant", double)
                    _agree(config, ("load_in_4bit", True), ("load_in_8bit", False), *states, name=name)
                    blocks = math.prod(stored[f"{name}.weight.absmax"])
                    codes = CodesScheme(GRIDS[FLOATS[kind, double]], _block_size(shape, blocks, name))
                    schemes[name] = LayerScheme(shape, (codes,))
        return schemes


def _agree(config: Mapping[str, Any], *states: tuple[str, Any], name: str) -> None:
    """Raise ValueError for a key of the config that states otherwise than the tensors of a layer."""
    for key, value in states:
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]}, but the tensors of {name} say {value}")


def _adapted(codes: CodesScheme) -> CodesScheme:
    """The stored form of codes: int8 codes have a scale per row."""
    return replace(codes, group_size="channel") if codes.grid is INT8 else codes


def _kind(scheme: LayerScheme) -> tuple[Grid, float | None]:
    """What the config states once for all layers."""
    return codes_of(scheme).grid, None if scheme.rounding is None else scheme.rounding.threshold


def _block_size(shape: tuple[int, int], blocks: int, name: str) -> int:
    """Weights per scale. Raises ValueError for blocks that are not groups of columns."""
    rows, width = shape
    size = rows * width // max(blocks, 1)
    if size not in BLOCKS or size * blocks != rows * width or width % size:
        raise ValueError(
            f"{name} has {blocks} blocks for {rows} x {width} weights; only blocks inside of rows are read"
        )
    return size


def _state(scheme: LayerScheme, dtype: torch.dtype, offset: float | None) -> bytes:
    """The text of quant_state. offset: nested_offset with double quantization, else None."""
    codes = codes_of(scheme)
    state: dict[str, Any] = {"quant_type": KINDS[codes.grid][0], "blocksize": codes.group_size}
    state |= {"dtype": dtype_name(dtype), "shape": list(scheme.shape)}
    if offset is None:
        return json.dumps(state).encode()
    nested = {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
    length = len(json.dumps(state | nested)) - len(json.dumps(offset)) + OFFSET
    return json.dumps(state | nested).ljust(length).encode()


def _as_bytes(weight: Tensor) -> Tensor:
    """Return the packed codes, which are stored in the dtype `bnb_4bit_quant_storage`, as bytes [n, 1]."""
    return weight.contiguous().view(torch.uint8).view(-1, 1) if weight.ndim == 2 and weight.shape[1] == 1 else weight


def _read_state(text: Int[Tensor, " n"], scheme: LayerScheme, kind: str) -> dict[str, Any]:
    """Read quant_state. Raises ValueError if it differs from the scheme."""
    name = f"{STATE}{kind}"
    if text.numel() > LARGEST_STATE:
        raise ValueError(f"{name} has {text.numel()} bytes, but it can have at most {LARGEST_STATE}")
    try:
        state = json.loads(bytes(text.flatten().tolist()).decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read ({error!r})") from error
    if not isinstance(state, dict) or not isinstance(state.get("shape"), list) or "blocksize" not in state:
        raise ValueError(f"{name} cannot be read (it is no object with shape and blocksize)")
    offset = state.get("nested_offset", None if KINDS[codes_of(scheme).grid][1] else 0.0)
    if not isinstance(offset, int | float) or abs(offset) > sys.float_info.max:
        raise ValueError(f"{name} cannot be read (its nested_offset is {offset!r}, which is no number)")
    stated = tuple(state["shape"]), state["blocksize"], state.get("nested_blocksize", NESTED)
    expected = scheme.shape, codes_of(scheme).group_size, NESTED
    if stated != expected:
        raise ValueError(f"{name} states shape, blocksize and nested_blocksize {stated}, but they must be {expected}")
    return state


def _map(kind: str) -> Tensor:
    """Return the value of each code."""
    if kind == "nf4":
        return torch.tensor(NF4_LEVELS)
    levels = torch.zeros(16)
    levels[list(FP4_CODES)] = torch.tensor(FP4_BNB_LEVELS)
    return levels


def _check_map(name: str, levels: Tensor, expected: Tensor) -> None:
    if not torch.allclose(levels.cpu(), expected, rtol=0, atol=1e-6):
        raise ValueError(f"{name} holds other values than those of bitsandbytes")


def _to_bnb(codes: Int[Tensor, "out in"], kind: str) -> Int[Tensor, "out in"]:
    """The codes of bitsandbytes for indexes into the levels of our grid."""
    if kind == "nf4":
        return codes
    return torch.tensor(FP4_CODES, dtype=torch.uint8, device=codes.device)[codes.long()]


def _from_bnb(codes: Int[Tensor, "out in"], kind: str) -> Int[Tensor, "out in"]:
    """The inverse of `_to_bnb`; both codes of zero become one."""
    if kind == "nf4":
        return codes
    back = torch.zeros(16, dtype=torch.uint8, device=codes.device)
    back[list(FP4_CODES)] = torch.arange(15, dtype=torch.uint8, device=codes.device)
    back[8] = FP4_CODES.index(0)
    return back[codes.long()]
