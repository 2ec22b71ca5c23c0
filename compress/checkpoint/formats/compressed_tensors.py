"""The format `compressed-tensors`: one config with groups of layers; each layout is a file in `layouts/`.

    config.json: quantization_config = {
        quant_method: compressed-tensors, version, format, quantization_status: compressed, ignore: [dense modules],
        config_groups: {group_0: {targets: [Linear] or module names, weights: {...}, input_activations, format}}}

The reader requires `quantization_status` and the `format` of each group. If all layers share one scheme, the target is
the class name `Linear`; otherwise each group lists its modules. Servers match the class name of every module that they
build as a linear, among them routers, which are no linears in transformers; `ignore` therefore names all modules with
dense weights, by patterns for those of several blocks.

    kv_cache_scheme: {num_bits: 8, type: float, symmetric: true, strategy: tensor, dynamic: false}
    <attention>.k_scale, <attention>.v_scale   float [1]

state that all keys and all values are rounded to 8-bit floats (e4m3) as they enter the cache. Servers support this
scheme only. compressed-tensors also reads integers with such a scale, but a server would interpret the scale as one of
8-bit floats; therefore integers are read here, but not written. The scheme is not written for models whose
configuration has no num_key_value_heads, because compressed-tensors cannot read it there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from compress.checkpoint.formats.accepted import Accepted
from compress.checkpoint.formats.base import Format, StoredLayer, refuses_all_but_codes
from compress.checkpoint.formats.config_groups import (
    CACHE,
    KEYS,
    cache_grid,
    check_other_parts,
    ignored,
    schemes_of_group,
    specificity,
)
from compress.checkpoint.formats.layouts.float_quantized import FloatQuantized
from compress.checkpoint.formats.layouts.int_quantized import IntQuantized
from compress.checkpoint.formats.layouts.layout import Layout, codes_of
from compress.checkpoint.formats.layouts.of_block_floats import BLOCK_FLOATS
from compress.checkpoint.formats.layouts.pack_quantized import PackQuantized, input_arguments
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.scheme import LayerScheme, find_rounding, only_codes
from compress.layers.transforms.rounding import InputRounding
from compress.models.caches.base import CachePolicy
from compress.models.caches.grid import GridCache
from compress.numerics.quant.grids import GRIDS, IntGrid

STORED = "int2 to int8, fp8_e4m3, mxfp4, mxfp8 or nvfp4"
"""The grids of weights that have a layout."""
WRITES_AS = "0.20.0"  # the version of compressed-tensors whose layout is written (dense streams for 3, 5, 6, 7 bits)
IN_BFLOAT16 = {layout.name for layout in BLOCK_FLOATS}
"""Layouts that transformers dequantizes in bfloat16."""
SERVED = GridCache(GRIDS["fp8_e4m3"], GRIDS["fp8_e4m3"], "static")
"""The policy that `CACHE`, a `kv_cache_scheme`, states."""
INPUT_SCALE, INPUT_GLOBAL_SCALE = "input_scale", "input_global_scale"
"""The stored names of a static scale of the inputs, and of the number that the scales of their groups share."""
ZEROS = ("weight_zero_point", "input_zero_point")
"""Tensors of zeros that early versions of compressed-tensors store without need."""

IN_WORDS, IN_BYTES, IN_FLOAT8 = PackQuantized(), IntQuantized(), FloatQuantized()
LAYOUTS: tuple[Layout, ...] = (IN_BYTES, IN_WORDS, IN_FLOAT8, *BLOCK_FLOATS)
"""The first layout that suits a scheme stores it."""
STATIC_INPUTS = (IN_BYTES, IN_FLOAT8)
"""Layouts whose readers support one static scale of the inputs, the tensor `INPUT_SCALE`."""


def layout_of(scheme: LayerScheme) -> Layout | None:
    """The layout for layers of a scheme, or None."""
    return next((layout for layout in LAYOUTS if layout.suits(scheme)), None)


def _input_specs(scheme: LayerScheme) -> dict[str, TensorSpec]:
    """The stored tensors of the quantization of inputs."""
    scale = None if scheme.rounding is None else scheme.rounding.scale
    specs = {"static": {INPUT_SCALE: TensorSpec((1,))}, "local": {INPUT_GLOBAL_SCALE: TensorSpec((1,), torch.float32)}}
    return specs.get(scale or "", {})


def _dequantized_early(scheme: LayerScheme) -> bool:
    """Whether transformers has to dequantize a layer while it loads; it does so in the stored dtype."""
    return not codes_of(scheme).symmetric and scheme.rounding is None


class CompressedTensors(Format):
    """The `compressed-tensors` format."""

    name = "compressed-tensors"
    negative_scales = True
    quant_method = "compressed-tensors"
    served = True
    fused = True
    keys: ClassVar[Mapping[str, Accepted]] = KEYS

    def of_config(self, config: Mapping[str, Any]) -> CompressedTensors:
        super().of_config(config)
        check_other_parts(config)
        return self

    def refuses(self, scheme: LayerScheme) -> str | None:
        reason = refuses_all_but_codes(scheme, f"format {self.name}")
        if reason is not None or scheme.codes is None:
            return reason
        if scheme.codes.float_zeros:
            return f"zero points of format {self.name} are integers; use zero_point: integer, or format: native"
        layout = layout_of(scheme)
        if layout is None:
            name = scheme.codes.grid.name
            return f"weights {name} have no layout; use {STORED}, or format: native"
        if scheme.rounding is not None and scheme.rounding.scale == "static" and layout not in STATIC_INPUTS:
            return (
                "a static scale of the inputs is stored only with int8 weights per channel or tensor, and with "
                "fp8_e4m3 weights; use activation_scale: token, or format: native"
            )
        blocks = scheme.codes.rows > 1
        if blocks and layout is not IN_FLOAT8:
            return "blocks of weights are stored only with fp8_e4m3; use block_rows: 1, or format: native"
        if blocks and not isinstance(scheme.codes.group_size, int):
            return "whole rows that share a scale have no layout; use a group_size in columns, or format: native"
        if (
            scheme.rounding is not None
            and scheme.rounding.scale == "group"
            and not blocks
            and layout not in BLOCK_FLOATS
        ):
            return (
                "a scale of the inputs per group is stored only with blocks of fp8_e4m3 weights; add block_rows: "
                "128, or use activation_scale: token, or format: native"
            )
        return layout.refuses(scheme)

    def adapt(self, scheme: LayerScheme) -> LayerScheme:
        layout = layout_of(scheme)
        if layout is None:
            return scheme
        return scheme.with_parts(layout.adapt(codes_of(scheme), scheme.shape[1]))

    def adapt_part(self, part: WeightPart) -> WeightPart:
        layout = layout_of(LayerScheme(part.shape, (part.scheme,)))
        codes = only_codes([part])
        return part if layout is None or codes is None else layout.adapt_part(codes)

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        return self._layout(scheme).tensors(scheme) | _input_specs(scheme)

    def units(self, scheme: LayerScheme) -> tuple[int, int]:
        return self._layout(scheme).units(codes_of(scheme))

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        codes, rounding = only_codes(parts), find_rounding(transforms)
        assert codes is not None, "refuses was not asked"
        inputs = {} if rounding is None else {INPUT_SCALE: rounding.scale, INPUT_GLOBAL_SCALE: rounding.shared}
        return self._layout(scheme).encode(codes) | {n: tensor for n, tensor in inputs.items() if tensor is not None}

    def readable(self, scheme: LayerScheme) -> Collection[str]:
        in_words = IN_WORDS.tensors(scheme) if self._layout(scheme) is IN_BYTES else {}
        return {*self.tensors(scheme), *in_words, *ZEROS}

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        layout = self._layout(scheme)
        if layout is IN_BYTES and "weight_packed" in tensors:  # other writers may pack int8 into 32-bit words
            layout = IN_WORDS
        for name in ZEROS:
            if name in tensors and name not in layout.tensors(scheme) and bool(tensors[name].any()):
                raise ValueError(f"{name} is not zero, but its config says symmetric")
        stored = checked(layout.tensors(scheme) | _input_specs(scheme), tensors, "")
        transforms = []
        if scheme.rounding is not None:
            inputs = {"scale": stored.get(INPUT_SCALE), "shared": stored.get(INPUT_GLOBAL_SCALE)}
            transforms.append(InputRounding(scheme.rounding, scheme.shape, inputs))
        return [layout.decode(stored, scheme)], transforms

    def _layout(self, scheme: LayerScheme) -> Layout:
        layout = layout_of(scheme)
        assert layout is not None, "refuses was not asked"
        return layout

    def reads_in(self, scheme: LayerScheme, dtype: torch.dtype, stored: torch.dtype) -> torch.dtype:
        layout = layout_of(scheme)
        if layout is not None and layout.name in IN_BFLOAT16:
            return torch.bfloat16
        return stored if _dequantized_early(scheme) else dtype

    def reads_experts_in(self, scheme: LayerScheme, dtype: torch.dtype, stored: torch.dtype) -> torch.dtype:
        return stored  # they are dequantized while the checkpoint is loaded

    def unreadable(self, layers: Sequence[StoredLayer], dtype: torch.dtype) -> str | None:
        coded = [layer for layer in layers if not layer.scheme.plain]
        if any(layer.transposed for layer in coded):
            return "this model's own layers are transposed (Conv1D), which compressed-tensors does not quantize"
        if any(layer.needs_weight and "weight" not in self.tensors(layer.scheme) for layer in coded):
            return "transformers initializes this model's linears by their weight, which packed layers do not have"
        if any(layer.overrides_forward for layer in coded):
            return "this model's linears override `forward` and read their weight, which packed layers do not have"
        if any(layer.expert and layer.scheme.plain for layer in layers):
            return "transformers does not read dense experts if other layers are quantized"
        codes = [codes_of(layer.scheme) for layer in coded]
        kinds = {(scheme.grid, scheme.group_size) for scheme in codes}
        inside = [layer.scheme for layer in coded if layer.expert]
        if inside and not _readable_experts(inside, len(kinds)):
            return "transformers reads experts only if packed with one scheme, without zero points or rounded inputs"
        if len(kinds) > 1 and any(not scheme.symmetric for scheme in codes):
            sizes = ", ".join(sorted({f"{grid.name} in groups of {size}" for grid, size in kinds}))
            return (
                f"transformers cannot load zero points if layers differ in bits or group size ({sizes}); use a "
                "group_size that divides the inputs of all layers, or symmetric: true"
            )
        narrowed = [layer.scheme for layer in coded if self.reads_in(layer.scheme, dtype, dtype) != dtype]
        if len(kinds) > 1 and narrowed:
            return "transformers runs block floats together with other schemes in bfloat16 only"
        if any(scheme.rounding is not None for scheme in narrowed):
            return "transformers runs block floats with quantized activations in bfloat16 only"
        if importlib.util.find_spec("compressed_tensors") is None:
            return "the package compressed-tensors is not installed (extra: compress-llm[compressed-tensors])"
        return None

    def states(self, policy: CachePolicy, model: PretrainedConfig) -> bool:
        heads = getattr(model.get_text_config(decoder=True), "num_key_value_heads", None)
        return policy == SERVED and heads is not None

    def state_cache(self, config: dict[str, Any] | None, ignore: list[str], policy: CachePolicy) -> dict[str, Any]:
        return {**(config or self._config({}, ignore)), "kv_cache_scheme": dict(CACHE)}

    def read_cache(self, config: Mapping[str, Any]) -> CachePolicy | None:
        record = config.get("kv_cache_scheme")
        if record is None:
            return None
        grid = cache_grid(record)
        return GridCache(grid, grid, "static")

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        return self._config(schemes, ignore) if schemes else None

    def _config(self, schemes: Mapping[str, LayerScheme], ignore: list[str]) -> dict[str, Any]:
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name, scheme in schemes.items():
            group = self._group(scheme)
            groups.setdefault(repr(group), (group, []))[1].append(name)
        single = len(groups) == 1
        config_groups = {
            f"group_{i}": {"targets": ["Linear"] if single else names, **group}
            for i, (group, names) in enumerate(groups.values())
        }
        formats = {group["format"] for group, _ in groups.values()}
        summary = formats.copy().pop() if len(formats) == 1 else "mixed-precision" if formats else "dense"
        settings = {
            "quant_method": self.quant_method,
            "version": WRITES_AS,
            "format": summary,
            "quantization_status": "compressed",
            "ignore": ignored(ignore, schemes),
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "transform_config": {},
            "config_groups": config_groups,
        }
        zeros = any(_dequantized_early(scheme) for scheme in schemes.values())
        rounded = any(group["input_activations"] is not None for group, _ in groups.values())
        if zeros or (single and formats <= IN_BFLOAT16 and not rounded):
            # transformers 5.23 gives packed zero points a wrong shape, and leaves block floats in bfloat16 in every
            # model dtype, unless it dequantizes weights while it loads (which it does only for a single scheme, and
            # then does not quantize inputs).
            settings["run_compressed"] = False
        return settings

    def _group(self, scheme: LayerScheme) -> dict[str, Any]:
        layout = self._layout(scheme)
        inputs = None if scheme.rounding is None else input_arguments(scheme)
        weights = layout.weight_arguments(scheme)
        return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": layout.name}

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        ignored = config.get("ignore") or []
        names = [name for name in shapes if not any(specificity(pattern, name) for pattern in ignored)]
        ranked: dict[str, tuple[int, LayerScheme]] = {}
        layouts = {layout.name: layout for layout in LAYOUTS}
        for key, group in config["config_groups"].items():
            codes, transforms = schemes_of_group(group, layouts, config.get("format"), f"config_groups.{key}.")
            for target in group["targets"]:
                if target not in shapes and target != "Linear" and not target.startswith("re:"):
                    raise ValueError(f"config_groups.{key}.targets holds {target!r}, which is no linear of the model")
            for name in names:
                rank = max((specificity(target, name) for target in group["targets"]), default=0)
                if rank > ranked.get(name, (0, None))[0]:
                    ranked[name] = rank, LayerScheme(shapes[name], (codes,), transforms)
        return {name: scheme for name, (_, scheme) in ranked.items()}


def _readable_experts(schemes: Sequence[LayerScheme], kinds: int) -> bool:
    """Return whether transformers unpacks these linears of experts: all in one integer scheme, without zero points."""
    codes = [codes_of(scheme) for scheme in schemes]
    plain = all(scheme.symmetric and not scheme.indexed for scheme in codes) and all(
        s.rounding is None for s in schemes
    )
    return kinds == 1 and plain and all(isinstance(scheme.grid, IntGrid) for scheme in codes)
