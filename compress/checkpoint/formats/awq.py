"""The format `awq`: the layout `gemm` of AutoAWQ.

    <m>.qweight   int32   [I, O/8]   codes q + 8; 8 columns of OUTPUTS in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7
    <m>.qzeros    int32   [G, O/8]   zero points + 8, packed in the same way
    <m>.scales    float16 [G, O]
    config.json: quantization_config = {
        quant_method: awq, bits: 4, group_size (-1: a whole row), zero_point: true, version: gemm,
        modules_to_not_convert: [dense modules],
        dynamic: {"-:^name$": {}} for dense linears of blocks, if there are any: GPTQModel reads only this list}

W^T[i, o] ~ (q - zero) * scale, with group i // group_size. The order of columns is the one in which the kernels of
AutoAWQ unpack a word. Weights without zero points are stored with zero points of 8, because not every reader knows
zero_point: false. All layers share one group size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from compress.checkpoint.formats.accepted import FLAG, NO_EFFECT, NULL, UNUSED, Accepted, only
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
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme, only_codes
from compress.numerics.quant.bits import pack, unpack
from compress.numerics.quant.codes import groups_in

BITS = 4
SIZES = (16, 32, 64, 128)
"""The group sizes of the kernels that transformers uses."""
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # field i of a word holds column ORDER[i] of 8
BACK = (0, 4, 1, 5, 2, 6, 3, 7)
PER_WORD = len(ORDER)

GEMM = Accepted("gemm", lambda value: isinstance(value, str) and value.lower() == "gemm")


class AWQ(Format):
    """The `awq` format."""

    name = "awq"
    negative_scales = True
    quant_method = "awq"
    served = True
    fused = True
    scale_dtype = torch.float16
    keys = KEYS | {
        "bits": only(BITS),
        "zero_point": FLAG,
        "desc_act": UNUSED,
        "sym": NO_EFFECT,  # the default of GPTQModel, which stores zero points all the same
        **dict.fromkeys(("version", "format", "checkpoint_format"), GEMM | NULL),
        "backend": only("auto", "autoawq", None) | Accepted("auto_round:...", lambda value: "auto_round" in str(value)),
    }

    @property
    def unverified(self) -> str:
        return "transformers reads format awq with the package gptqmodel, which runs do not use"

    def refuses(self, scheme: LayerScheme) -> str | None:
        reason = refuses_codes(scheme, self.name, (BITS,), SIZES)
        if reason is not None or scheme.codes is None:
            return reason
        if scheme.codes.indexed:
            return "format awq has no group index; use act_order: static, format: gptq, or format: native"
        if scheme.shape[0] % PER_WORD:
            return f"format awq packs {PER_WORD} rows into a word, not {scheme.shape[0]}; use format: native"
        return None

    def clash(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        sizes = {scheme.codes.group_size for scheme in schemes.values() if scheme.codes is not None}
        if len(sizes) > 1:
            listed_sizes = ", ".join(sorted(map(str, sizes)))
            return f"format awq has one group size for all layers, not {listed_sizes}; use one of them, or format: gptq"
        return None

    def adapt(self, scheme: LayerScheme) -> LayerScheme:
        codes = scheme.codes
        return scheme if codes is None else scheme.with_parts(replace(adapted_codes(codes), symmetric=False))

    def adapt_part(self, part: WeightPart) -> WeightPart:
        codes = only_codes([part])
        if codes is None:
            return part
        codes = adapted_part(codes)
        if codes.zero is not None:
            return codes
        return codes.changed(
            replace(codes.scheme, symmetric=False), zero=torch.zeros_like(codes.scale, dtype=torch.int8)
        )

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        codes, (rows, width) = codes_of(scheme), scheme.shape
        groups = groups_in(width, codes.group_size)
        return {
            "qweight": TensorSpec((width, rows // PER_WORD), torch.int32),
            "qzeros": TensorSpec((groups, rows // PER_WORD), torch.int32),
            "scales": TensorSpec((groups, rows), torch.float16),
        }

    def units(self, scheme: LayerScheme) -> tuple[int, int]:
        return PER_WORD, columns_of_group(codes_of(scheme))

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        part = only_codes(parts)
        assert part is not None, "refuses was not asked"
        return {
            "qweight": _pack(unpack(part.words, BITS, part.shape[1]).T),
            "qzeros": _pack(unsigned_zeros(part).T),
            "scales": part.scale.T.contiguous(),
        }

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        codes, rows = codes_of(scheme), scheme.shape[0]
        specs = self.tensors(scheme)
        specs["scales"] = TensorSpec(specs["scales"].shape)  # other writers store other floats
        stored = checked(specs, tensors, "")
        zero: Tensor | None = signed_zeros(_unpack(stored["qzeros"], rows).T, codes)
        if codes.symmetric:
            if bool(zero.any()):
                raise ValueError("qzeros are not all 8, but its config says zero_point: false")
            zero = None
        words = pack(_unpack(stored["qweight"], rows).T, BITS)
        fields = {"words": words, "scale": stored["scales"].T.contiguous(), "zero": zero}
        return [CodesPart(codes, scheme.shape, fields)], []

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        if not schemes:
            return None
        size = codes_of(next(iter(schemes.values()))).group_size
        settings = {
            "quant_method": self.quant_method,
            "bits": BITS,
            "group_size": size if isinstance(size, int) else -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [name.rstrip(".") for name in ignore],
        }
        inside = [name for name in ignore if in_block(name) is not None]
        return settings | {"dynamic": skipped(inside)} if inside else settings

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        schemes = {}
        for name, shape in shapes.items():
            if f"{name}.qweight" in stored:
                size = read_group_size(shape[1], config["group_size"], stored[f"{name}.scales"][0], name)
                codes = CodesScheme(int_grid(BITS), size, not config.get("zero_point", True))
                schemes[name] = LayerScheme(shape, (codes,))
        return schemes


def _pack(codes: Int[Tensor, "n out"]) -> Int[Tensor, "n words"]:
    """Pack unsigned codes along the outputs, in the order of AutoAWQ."""
    fields = codes.unflatten(-1, (-1, PER_WORD))[..., list(ORDER)]
    return pack(fields.flatten(-2), BITS)


def _unpack(words: Int[Tensor, "n words"], rows: int) -> Int[Tensor, "n out"]:
    """The inverse of `_pack`."""
    return unpack(words, BITS, rows).unflatten(-1, (-1, PER_WORD))[..., list(BACK)].flatten(-2)
