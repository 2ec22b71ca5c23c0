"""The compressed-tensors family: one config with groups of layers, each in a layout of its own file.

    config.json: quantization_config = {
        quant_method: compressed-tensors, version, format, quantization_status: compressed, ignore: [dense linears],
        config_groups: {group_0: {targets: [Linear] or module names, weights: {...}, input_activations, format}}}

`quantization_status` and each group's own `format` are required by the reader. Where all layers share one scheme the
target is the class name `Linear`, otherwise each group lists its modules.

    kv_cache_scheme: {num_bits: 8, type: float, symmetric: true, strategy: tensor, dynamic: false}
    <attention>.k_scale, <attention>.v_scale   float [1]

say that all keys and all values are rounded to 8-bit floats (e4m3) as they enter the cache. It is the one scheme that
servers know: integers with such a scale are read back by compressed-tensors, too, but a server would take the scale for
one of 8-bit floats, so they are read here, and not written. Nor is it for models whose configuration does not name
num_key_value_heads: compressed-tensors could not read those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from compress.errors import ModelError
from compress.formats.base import CacheScheme, Format, Scheme, refuses_inputs
from compress.formats.layouts.float_quantized import FloatQuantized
from compress.formats.layouts.int_quantized import IntQuantized
from compress.formats.layouts.layout import Layout
from compress.formats.layouts.mxfp4_pack_quantized import MXFP4PackQuantized
from compress.formats.layouts.nvfp4_pack_quantized import NVFP4PackQuantized
from compress.formats.layouts.pack_quantized import PackQuantized, input_arguments
from compress.numerics.quant.grids import GRIDS, Grid, IntGrid
from compress.numerics.quant.packed import PackedCodes

WRITES_AS = "0.20.0"  # the version of compressed-tensors whose layout is written (dense streams for 3, 5, 6, 7 bits)
IN_BFLOAT16 = {MXFP4PackQuantized.name, NVFP4PackQuantized.name}
"""Layouts that transformers multiplies out in bfloat16."""
GROUPED = ("group", "tensor_group")
INPUTS = {"int": GRIDS["int8"], "float": GRIDS["fp8_e4m3"]}
"""The grid of 8-bit inputs by the type that a config names."""
CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
SERVED = CacheScheme(INPUTS["float"], INPUTS["float"], "static")
"""What `CACHE`, a `kv_cache_scheme`, says."""

IN_WORDS, IN_BYTES = PackQuantized(), IntQuantized()
LAYOUTS: tuple[Layout, ...] = (IN_BYTES, IN_WORDS, FloatQuantized(), MXFP4PackQuantized(), NVFP4PackQuantized())
"""The first that suits a scheme holds it."""


def layout_of(scheme: Scheme) -> Layout | None:
    """The layout for layers of a scheme; None where the family has none."""
    return next((layout for layout in LAYOUTS if layout.suits(scheme)), None)


class CompressedTensors(Format):
    """The `compressed-tensors` format."""

    name = "compressed-tensors"
    input_names = {"activation_scale": "input_scale"}

    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        reason = refuses_inputs(scheme, f"format {self.name}")
        if reason is not None:
            return reason
        if scheme.float_zeros:
            return f"zero points of format {self.name} are whole numbers; use zero_point: integer, or format: native"
        layout = layout_of(scheme)
        if layout is None:
            name = scheme.coded.name
            return f"weights {name} have no layout; use int2 to int8, fp8_e4m3, mxfp4 or nvfp4, or format: native"
        if scheme.activation_scale == "static" and not IN_BYTES.suits(scheme):
            return (
                "a static scale of the inputs is stored only with int8 weights per channel or tensor; "
                "use activation_scale: token, or format: native"
            )
        return layout.refuses(scheme, shape)

    def adapt(self, packed: PackedCodes) -> PackedCodes:
        return self._layout(Scheme.of(packed, None)).adapt(packed)

    def encode(self, packed: PackedCodes, activations: Grid | None) -> dict[str, Tensor]:
        return self._layout(Scheme.of(packed, activations)).encode(packed)

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        if isinstance(scheme.grid, IntGrid):  # others may have written int8 for integer inputs in words
            return (IN_WORDS if "weight_packed" in tensors else IN_BYTES).decode(tensors, scheme)
        return self._layout(scheme).decode(tensors, scheme)

    def _layout(self, scheme: Scheme) -> Layout:
        layout = layout_of(scheme)
        assert layout is not None, "refuses was not asked"
        return layout

    def states(self, scheme: CacheScheme, model: PretrainedConfig) -> bool:
        heads = getattr(model.get_text_config(decoder=True), "num_key_value_heads", None)
        return scheme == SERVED and heads is not None

    def config(
        self, schemes: Mapping[str, Scheme], ignore: list[str], version: str, cached: CacheScheme | None = None
    ) -> dict[str, Any] | None:
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name, scheme in schemes.items():
            group = self._group(scheme)
            groups.setdefault(repr(group), (group, []))[1].append(name)
        if not groups and cached is None:
            return None
        single = len(groups) == 1
        config_groups = {
            f"group_{i}": {"targets": ["Linear"] if single else names, **group}
            for i, (group, names) in enumerate(groups.values())
        }
        formats = {group["format"] for group, _ in groups.values()}
        summary = formats.copy().pop() if len(formats) == 1 else "mixed-precision" if formats else "dense"
        found = {
            "quant_method": "compressed-tensors",
            "version": WRITES_AS,
            "format": summary,
            "quantization_status": "compressed",
            "ignore": ignore,
            "global_compression_ratio": None,
            "kv_cache_scheme": None if cached is None else dict(CACHE),
            "sparsity_config": {},
            "transform_config": {},
            "config_groups": config_groups,
        }
        zeros = any(not scheme.symmetric and scheme.activations is None for scheme in schemes.values())
        if zeros or (single and formats <= IN_BFLOAT16):
            # transformers 5.23 shapes packed zero points wrongly, and leaves 4-bit floats in bfloat16 whatever the
            # model's dtype is, unless it multiplies the weights out while loading (which it does for one scheme only).
            found["run_compressed"] = False
        return found

    def _group(self, scheme: Scheme) -> dict[str, Any]:
        layout = self._layout(scheme)
        inputs = None if scheme.activations is None else input_arguments(scheme)
        weights = layout.weight_arguments(scheme)
        return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": layout.name}

    def cached(self, config: Mapping[str, Any]) -> CacheScheme | None:
        record = config.get("kv_cache_scheme")
        if record is None:
            return None
        usual = {**CACHE, "type": record.get("type")}
        differing = {name: record.get(name) for name, value in usual.items() if record.get(name, value) != value}
        if differing or record.get("type") not in INPUTS:
            raise ValueError(f"kv_cache_scheme {record} cannot be read, only 8 bits with one static scale per tensor")
        grid = INPUTS[record["type"]]
        return CacheScheme(grid, grid, "static")

    def schemes(self, config: Mapping[str, Any], names: list[str]) -> dict[str, Scheme]:
        found: dict[str, Scheme] = {}
        layouts = {layout.name: layout for layout in LAYOUTS}
        for group in config["config_groups"].values():
            weights, inputs = group["weights"], group.get("input_activations")
            name = group.get("format") or config["format"]
            if name not in layouts:
                known = ", ".join(layouts)
                raise ModelError(f"model: the layout {name!r} of compressed-tensors cannot be read; known: {known}")
            layout = layouts[name]
            scheme = Scheme(
                layout.grid_of(weights),
                weights["group_size"] if weights["strategy"] in GROUPED else weights["strategy"],
                weights["symmetric"],
                activations=None if inputs is None else INPUTS[inputs["type"]],
                activation_scale="token" if inputs is None or inputs["dynamic"] else "static",
            )
            everywhere = "Linear" in group["targets"]
            targets = set(group["targets"])
            ignored = set(config.get("ignore", []))
            found |= {name: scheme for name in names if name in targets or (everywhere and name not in ignored)}
        return found
