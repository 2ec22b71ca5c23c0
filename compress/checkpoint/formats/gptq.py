"""The format `gptq`, which AutoGPTQ introduced and GPTQModel writes.

    <m>.qweight   int32   [I*b/32, O]   codes q + 2^(b-1), a dense bit stream along the INPUT axis, least significant
                                        bit first (2, 3, 4 or 8 bits; codes of 3 bits cross word borders)
    <m>.qzeros    int32   [G, O*b/32]   zero points + 2^(b-1), packed along the OUTPUT axis in the same way
    <m>.scales    float16 [G, O]
    <m>.g_idx     int32   [I]           the group of each column: i // group_size, or any other with act_order: group
    config.json: quantization_config = {
        quant_method: gptq, bits, group_size (-1: a whole row), desc_act, sym, checkpoint_format, pack_dtype: int32,
        lm_head: false,
        dynamic: {"+:^name(\\.|$)": {other bits or group_size}, "-:^name$": {} for dense linears}}

W^T[i, o] ~ scales[g_idx[i], o] * (q[i, o] - zero[g_idx[i], o]). There are two versions. checkpoint_format gptq stores
zero - 1, in each field modulo 2^b; gptq_v2 stores the zero point itself. Kernels of the first version add 1 without a
modulus, so they cannot represent a zero point 0, and converters that subtract 1 from whole words borrow from the next
field. Symmetric weights (all zero points in the middle) are therefore written in the first version, which every reader
knows, and weights with zero points in the second. A symmetric checkpoint whose version is stated wrongly is still read
correctly, because its zero points are known.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from compress.checkpoint.formats.accepted import FLAG, INTEGER, NO_EFFECT, NULL, check_keys, only, without_effect
from compress.checkpoint.formats.base import Format
from compress.checkpoint.formats.layouts.integer_groups import (
    KEYS,
    adapted_codes,
    adapted_part,
    in_block,
    int_grid,
    read_group_size,
    refuses_codes,
    signed_zeros,
    skipped,
    unsigned_zeros,
)
from compress.checkpoint.formats.layouts.layout import codes_of, columns_of_group
from compress.checkpoint.formats.patterns import matches
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme, only_codes
from compress.numerics.quant.bits import pack, packed_width, unpack, whole_words
from compress.numerics.quant.codes import groups_in

BITS = (2, 3, 4, 8)
SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""The group sizes of GPTQModel's kernels."""
UNIT = 32  # GPTQModel packs rows and columns in units of 32
VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""What each version subtracts from zero points, by its name in the config."""

LAYER_KEYS = {
    "bits": only(*BITS),
    "group_size": INTEGER,
    "desc_act": FLAG,
    "sym": FLAG,
    **without_effect("mse", "damp_percent", "damp_auto_increment", "static_groups", "act_group_aware", "hyb_act"),
}
"""The keys of an entry of `dynamic`."""


@dataclass(frozen=True)
class GPTQ(Format):
    """The `gptq` format. offset: what the files subtract from zero points; None: 1 if symmetric, else 0."""

    name = "gptq"
    negative_scales = True
    quant_method = "gptq"
    served = True
    fused = True
    scale_dtype = torch.float16
    keys = KEYS | {
        "bits": only(*BITS),
        "desc_act": FLAG | NULL,
        "sym": FLAG | NULL,
        **dict.fromkeys(("format", "checkpoint_format"), only(*VERSIONS, None)),
        "backend": NO_EFFECT,
    }

    offset: int | None = None

    def of_config(self, config: Mapping[str, Any]) -> GPTQ:
        super().of_config(config)
        versions = {config[key] for key in ("checkpoint_format", "format") if config.get(key)} or {"gptq"}
        if len(versions) > 1:
            raise ValueError(f"format and checkpoint_format are {' and '.join(sorted(versions))}, but must be equal")
        for pattern, changes in (config.get("dynamic") or {}).items():
            check_keys(changes, LAYER_KEYS, f"dynamic.{pattern}.")
        return GPTQ(VERSIONS[versions.pop()])

    @property
    def unverified(self) -> str:
        return "transformers reads format gptq with the packages gptqmodel and optimum, which runs do not use"

    def refuses(self, scheme: LayerScheme) -> str | None:
        reason = refuses_codes(scheme, self.name, BITS, SIZES)
        if reason is not None or scheme.plain:
            return reason
        if any(size % UNIT for size in scheme.shape):
            rows, width = scheme.shape
            return f"format gptq packs units of {UNIT} rows and columns, not {rows} x {width}; use format: native"
        return None

    def clash(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        kinds = {scheme.codes.symmetric for scheme in schemes.values() if scheme.codes is not None}
        if len(kinds) == 2:
            return (
                "layers with zero points are stored in another version of format gptq than layers without; write the "
                "same symmetric: in all passes and overrides, or use format: native"
            )
        return None

    def adapt(self, scheme: LayerScheme) -> LayerScheme:
        return scheme if scheme.codes is None else scheme.with_parts(adapted_codes(scheme.codes))

    def adapt_part(self, part: WeightPart) -> WeightPart:
        codes = only_codes([part])
        return part if codes is None else adapted_part(codes)

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        codes, (rows, width) = codes_of(scheme), scheme.shape
        bits, groups = codes.grid.bits, groups_in(width, codes.group_size)
        return {
            "qweight": TensorSpec((packed_width(width, bits), rows), torch.int32),
            "qzeros": TensorSpec((groups, packed_width(rows, bits)), torch.int32),
            "scales": TensorSpec((groups, rows), torch.float16),
            "g_idx": TensorSpec((width,), torch.int32),
        }

    def units(self, scheme: LayerScheme) -> tuple[int, int]:
        codes = codes_of(scheme)
        return whole_words(codes.grid.bits), math.lcm(columns_of_group(codes), whole_words(codes.grid.bits))

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        part = only_codes(parts)
        assert part is not None, "refuses was not asked"
        bits, offset = part.grid.bits, int(part.zero is None) if self.offset is None else self.offset
        zeros = (unsigned_zeros(part) - offset) & (2**bits - 1)
        index = _contiguous(part.scheme, part.shape[1]) if part.group_index is None else part.group_index
        return {
            "qweight": part.words.T.contiguous(),
            "qzeros": pack(zeros.T, bits),
            "scales": part.scale.T.contiguous(),
            "g_idx": index,
        }

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        codes = codes_of(scheme)
        specs = self.tensors(scheme)
        specs["scales"] = TensorSpec(specs["scales"].shape)  # other writers store other floats
        if "g_idx" not in tensors and not codes.indexed:
            del specs["g_idx"]
        stored = checked(specs, tensors, "")
        index = stored.get("g_idx")
        if index is not None:
            _check_index(index, codes, scheme.shape[1], stored["scales"].shape[0])
        fields = {
            "words": stored["qweight"].T.contiguous(),
            "scale": stored["scales"].T.contiguous(),
            "zero": self._zeros(stored["qzeros"], codes, scheme.shape[0]),
            "group_index": index if codes.indexed else None,
        }
        return [CodesPart(codes, scheme.shape, fields)], []

    def _zeros(self, words: Tensor, codes: CodesScheme, rows: int) -> Int[Tensor, "out groups"] | None:
        """The zero points, or None for symmetric codes. Raises ValueError."""
        bits = codes.grid.bits
        stored = unpack(words, bits, rows)
        if codes.symmetric:
            middle = -codes.grid.lowest_stored
            low, high = int(stored.min()), int(stored.max())
            if low != high or low not in (middle, middle - 1):
                raise ValueError(f"qzeros holds {low} to {high}, but its config says sym, so all must be {middle}")
            return None
        unsigned = (stored.to(torch.int16) + (self.offset or 0)) & (2**bits - 1)
        return signed_zeros(unsigned.T, codes)

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        if not schemes:
            return None
        facts = {name: _facts(codes_of(scheme)) for name, scheme in schemes.items()}
        base = dict(Counter(tuple(sorted(fact.items())) for fact in facts.values()).most_common(1)[0][0])
        changes_by_name = {name: {k: v for k, v in fact.items() if v != base[k]} for name, fact in facts.items()}
        inside = [name for name in ignore if in_block(name) is not None]
        # the builder of ONNX Runtime GenAI matches names of tensors, other programs those of modules
        dynamic = {rf"+:^{re.escape(name)}(\.|$)": changes for name, changes in changes_by_name.items() if changes}
        dynamic |= skipped(inside)
        symmetric = all(codes_of(scheme).symmetric for scheme in schemes.values())
        layout = "gptq" if symmetric else "gptq_v2"
        settings: dict[str, Any] = {"quant_method": self.quant_method, **base, "sym": symmetric, "lm_head": False}
        settings |= {"format": layout, "checkpoint_format": layout, "pack_dtype": "int32"}
        settings["meta"] = {"quantizer": [f"compress:{version}"]}
        if dynamic:
            settings["dynamic"] = dynamic
        kinds = {in_block(name) for name in schemes} - {None}
        if inside and not kinds & {in_block(name) for name in inside}:
            settings["modules_in_block_to_quantize"] = [sorted(str(kind) for kind in kinds)]  # for transformers
        return settings

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        schemes = {}
        for name, shape in shapes.items():
            if f"{name}.qweight" not in stored:
                continue
            settings = _settings(config, name)
            words, groups = stored[f"{name}.qweight"][0], stored[f"{name}.scales"][0]
            bits = settings["bits"]
            if words != packed_width(shape[1], bits):
                raise ValueError(f"{name}.qweight has {words} words for {shape[1]} inputs, but bits is {bits}")
            size = read_group_size(shape[1], settings["group_size"], groups, name)
            indexed = bool(settings.get("desc_act", False)) and isinstance(size, int)
            codes = CodesScheme(int_grid(bits), size, settings.get("sym") is not False, indexed)
            schemes[name] = LayerScheme(shape, (codes,))
        return schemes


def _contiguous(codes: CodesScheme, width: int) -> Int[Tensor, " in"]:
    """The group of each column of contiguous groups."""
    size = codes.group_size if isinstance(codes.group_size, int) else width
    return torch.arange(width, dtype=torch.int32) // size


def _check_index(index: Int[Tensor, " in"], codes: CodesScheme, width: int, groups: int) -> None:
    """Raise ValueError for a group index out of range, or one that the scheme does not state."""
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        raise ValueError(f"g_idx holds groups {low} to {high}, but there are {groups} groups")
    if not codes.indexed and not torch.equal(index.cpu(), _contiguous(codes, width)):
        raise ValueError("g_idx is not in order, but the config does not say desc_act")


def _facts(codes: CodesScheme) -> dict[str, Any]:
    """The settings of a layer in the config."""
    size = codes.group_size if isinstance(codes.group_size, int) else -1
    return {"bits": codes.grid.bits, "group_size": size, "desc_act": codes.indexed}


def _settings(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of one layer: those of the config, changed by the first matching entry of `dynamic`."""
    for pattern, changes in (config.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and matches(pattern.removeprefix("+:"), name):
            return {**config, **changes}
    return dict(config)
