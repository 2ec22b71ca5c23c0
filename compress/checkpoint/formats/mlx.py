"""The format `mlx`: the affine layout of MLX, as mlx-lm writes and reads it.

    <m>.weight   uint32 [O, I*b/32]   unsigned codes along the input axis, a dense bit stream, least significant bit
                                      first (2, 3, 4, 5, 6 or 8 bits; those of 3, 5 and 6 cross word borders)
    <m>.scales   float  [O, I/group]  of either sign, in the dtype of dense tensors
    <m>.biases   float  [O, I/group]  the minimum of the group, in the same dtype
    <m>.bias     float  [O]           the bias of the layer, if it has one
    config.json: quantization = {group_size (32, 64 or 128), bits, mode: affine,
                                 <m>: {group_size, bits, mode} for layers that differ}
                 quantization_config: the same with quant_method: mlx, which mlx-lm does not write

W ~ codes * scales + biases. Dense layers have no scales. An embedding may hold codes; one that is tied to the LM head
is stored under the name of the embedding. mlx-lm computes in the dtype of the scales.

Grids `uint2` to `uint8` are stored as they are. Other integers become one of them: codes are counted from 0, and biases
are (lowest code - zero point) * scale. These are exact without zero points, because the lowest code is a power of two.
With zero points they are rounded to the dtype of the scales, by at most 2^-8 of the bias in bfloat16 and 2^-11 in
float16: with 8 bits in bfloat16 that is up to one step, which `weights: uint8` avoids, because it computes the codes
for the rounded minimum. Groups that MLX does not have are stored as smaller groups with repeated scales.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from compress.checkpoint.formats.accepted import Accepted, check_keys, only, without_effect
from compress.checkpoint.formats.base import Ends, Format, refuses_transforms, unstated_rounding
from compress.checkpoint.formats.layouts.layout import codes_of
from compress.checkpoint.formats.readers import table
from compress.checkpoint.sources.stated import MLX_KEY
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme, only_codes
from compress.numerics.quant.bits import packed_width
from compress.numerics.quant.codes import spread
from compress.numerics.quant.grids import GRIDS, Grid, IntGrid, OffsetGrid

BITS = (2, 3, 4, 5, 6, 8)
SIZES = (128, 64, 32)
AFFINE = "affine"
LAYER_KEYS: dict[str, Accepted] = {"group_size": only(*SIZES), "bits": only(*BITS), "mode": only(AFFINE, None)}
"""The keys of the entry of one layer."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT = re.compile(r"\.experts\.\d+\.")


class MLX(Format):
    """The `mlx` format."""

    name = "mlx"
    quant_method = "mlx"
    negative_scales = True
    embeddings = True
    keys: ClassVar[Mapping[str, Accepted]] = LAYER_KEYS | without_effect("quant_method")

    def of_config(self, config: Mapping[str, Any]) -> MLX:
        layers = {name: value for name, value in config.items() if isinstance(value, Mapping | bool)}
        check_keys({name: value for name, value in config.items() if name not in layers}, self.keys)
        for name, settings in layers.items():
            if not isinstance(settings, bool):
                check_keys(settings, LAYER_KEYS, f"{name}.")
        return self

    @property
    def unverified(self) -> str:
        return "transformers does not read format mlx"

    def refuses(self, scheme: LayerScheme) -> str | None:
        format_name = f"format {self.name}"
        reason = refuses_transforms(scheme, format_name)
        if reason is not None or scheme.plain:
            return reason
        if scheme.rounding is not None:
            return unstated_rounding(scheme.rounding, format_name)
        codes, width = scheme.codes, scheme.shape[1]
        if codes is None:
            return f"{format_name} holds only codes, not {scheme.text}; use format: native"
        if _affine(codes.grid) is None:
            names = ", ".join(f"int{bits}" for bits in BITS)
            names += f", {', '.join(f'uint{bits}' for bits in BITS)}"
            return f"{format_name} holds weights {names}, not {codes.grid.name}; use one of them, or format: native"
        if codes.indexed:
            return f"{format_name} has no group index; use act_order: static, format: gptq, or format: native"
        if _group_size(codes, width) is None:
            sizes = ", ".join(str(size) for size in reversed(SIZES) if width % size == 0)
            instead = f"use group_size: {sizes}" if sizes else "leave the layer dense (weights: none in overrides)"
            return (
                f"{format_name} has groups of 32, 64 or 128 columns, which groups of {codes.group_size} for {width} "
                f"inputs do not consist of; {instead}, or format: native"
            )
        return None

    def refuses_model(self, ends: Ends) -> str | None:
        kind = ends.config.model_type
        has_experts = any(getattr(ends.config, name, None) for name in EXPERT_COUNTS)
        stacked = table()["stacked"][self.name]
        if not has_experts or kind in stacked:
            return None
        return (
            f"mlx-lm is not known to stack quantized experts of models of the type {kind}, only of {', '.join(stacked)}"
        )

    def clash(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        stacks: dict[str, set[str]] = {}
        for name, scheme in schemes.items():
            if EXPERT.search(name):
                stacks.setdefault(EXPERT.sub(".experts.*.", name), set()).add(scheme.text)
        mixed = next((name for name, texts in stacks.items() if len(texts) > 1), None)
        if mixed is None:
            return None
        return (
            f"mlx-lm stacks {mixed}, but they are stored as {', '.join(sorted(stacks[mixed]))}; use the same weights "
            "and group_size for all experts, or format: native"
        )

    def adapt(self, scheme: LayerScheme) -> LayerScheme:
        codes = scheme.codes
        if codes is None or self.refuses(scheme) is not None:
            return scheme
        return scheme.with_parts(_adapted(codes, scheme.shape[1]))

    def adapt_part(self, part: WeightPart) -> WeightPart:
        codes = only_codes([part])
        if codes is None or codes.scheme == (adapted := _adapted(codes.scheme, codes.shape[1])):
            return part
        rows, width = codes.shape
        zeros, size = codes.zeros(), adapted.group_size
        minimum = zeros
        if isinstance(codes.grid, IntGrid):
            lowest = torch.full_like(codes.scale, codes.grid.lowest, dtype=torch.float32)
            minimum = (lowest if zeros is None else lowest - zeros.float()) * codes.scale.float()
        assert minimum is not None and isinstance(size, int)

        def in_groups(values: Tensor) -> Tensor:
            all_columns = spread(values, width, codes.group_size).expand(rows, width)
            return all_columns[:, ::size].to(codes.scale.dtype).contiguous()

        return codes.changed(adapted, scale=in_groups(codes.scale), zero=in_groups(minimum))

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        codes, (rows, width) = codes_of(scheme), scheme.shape
        assert isinstance(codes.group_size, int), "the scheme is adapted"
        scales = TensorSpec((rows, width // codes.group_size))
        words = TensorSpec((rows, packed_width(width, codes.grid.bits)), torch.uint32)
        return {"weight": words, "scales": scales, "biases": scales}

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        part = only_codes(parts)
        assert part is not None and part.zero is not None, "the part is adapted"
        return {"weight": part.words.view(torch.uint32), "scales": part.scale, "biases": part.zero}

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        stored = checked(self.tensors(scheme), tensors, "")
        if stored["scales"].dtype != stored["biases"].dtype:
            raise ValueError(f"scales are {stored['scales'].dtype}, but biases are {stored['biases'].dtype}")
        words = stored["weight"].view(torch.int32)
        fields = {"words": words, "scale": stored["scales"], "zero": stored["biases"]}
        return [CodesPart(codes_of(scheme), scheme.shape, fields)], []

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        if not schemes:
            return None
        settings = {name: _settings(codes_of(scheme)) for name, scheme in schemes.items()}
        ((bits, size), _), *_ = Counter((s["bits"], s["group_size"]) for s in settings.values()).most_common(1)
        base = {"group_size": size, "bits": bits, "mode": AFFINE}
        others = {name: values for name, values in settings.items() if values != base}
        return {"quant_method": self.quant_method, **base, **others}

    def entries(self, quantization: Mapping[str, Any] | None, config: PretrainedConfig) -> dict[str, Any]:
        stated = {key: value for key, value in (quantization or {}).items() if key != "quant_method"}
        return ({MLX_KEY: stated} if stated else {}) | _rotary_entries(getattr(config, "rope_parameters", None))

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        schemes = {}
        for name, shape in shapes.items():
            words, scales = stored.get(f"{name}.weight"), stored.get(f"{name}.scales")
            if words is None or scales is None:
                continue
            settings = config.get(name)
            if not isinstance(settings, Mapping):  # mlx-lm infers them, too
                settings = {"bits": words[-1] * 32 // shape[1], "group_size": shape[1] // scales[-1]}
                check_keys(settings, LAYER_KEYS, f"{name}.")
            codes = CodesScheme(GRIDS[f"uint{settings['bits']}"], settings["group_size"], symmetric=False)
            schemes[name] = LayerScheme(shape, (codes,))
        return schemes


def _affine(grid: Grid) -> Grid | None:
    """Return the grid of the stored form of a grid: unsigned integers with a minimum; None if there is none."""
    is_integer = isinstance(grid, IntGrid | OffsetGrid) and grid.scaling.free
    return GRIDS[f"uint{grid.bits}"] if is_integer and grid.bits in BITS else None


def _group_size(codes: CodesScheme, width: int) -> int | None:
    """Return the largest group size of MLX whose groups divide those of the codes; None if there is none."""
    size = codes.group_size if isinstance(codes.group_size, int) else width
    return next((stored for stored in SIZES if width % stored == 0 and size % stored == 0), None)


def _adapted(codes: CodesScheme, width: int) -> CodesScheme:
    """Return the stored form of a scheme of codes."""
    grid, size = _affine(codes.grid), _group_size(codes, width)
    assert grid is not None and size is not None, "refuses was not asked"
    return replace(codes, grid=grid, group_size=size, symmetric=False, float_zeros=False, rows=1)


def _settings(codes: CodesScheme) -> dict[str, Any]:
    """Return the entry of a layer in the config."""
    return {"group_size": codes.group_size, "bits": codes.grid.bits, "mode": AFFINE}


def _rotary_entries(parameters: Any) -> dict[str, Any]:
    """Return the rotary embedding in the entries of older configurations, because most models of mlx-lm read no others.

    Args:
        parameters: `rope_parameters` of transformers 5: of all layers, or by the type of a layer.
    """
    if not isinstance(parameters, Mapping):
        return {}
    if "rope_theta" not in parameters:
        local, every = parameters.get("sliding_attention"), parameters.get("full_attention")
        entries = _rotary_entries(every)
        if isinstance(local, Mapping) and "rope_theta" in local:
            entries["rope_local_base_freq"] = local["rope_theta"]
        return entries
    entries = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        entries["rope_scaling"] = {"type": kind, **parameters}
    return entries
