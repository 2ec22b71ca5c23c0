"""The compressed-tensors family: one config with groups of layers, each in a layout of its own file.

    config.json: quantization_config = {
        quant_method: compressed-tensors, version, format, quantization_status: compressed, ignore: [dense linears],
        config_groups: {group_0: {targets: [Linear] or module names, weights: {...}, input_activations, format}}}

`quantization_status` and each group's own `format` are required by the reader. Where all layers share one scheme the
target is the class name `Linear`, otherwise each group lists its modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from compress.formats import int_quantized, pack_quantized
from compress.formats.base import Format, Scheme, refuses_inputs
from compress.numerics.grids import GRIDS, Grid
from compress.numerics.packed import PackedCodes

WRITES_AS = "0.20.0"  # the version of compressed-tensors whose layout is written (dense streams for 3, 5, 6, 7 bits)


class CompressedTensors(Format):
    """The `compressed-tensors` format."""

    name = "compressed-tensors"
    input_names = {"activation_scale": "input_scale"}

    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        reason = refuses_inputs(scheme, f"format {self.name}")
        if reason is not None:
            return reason
        if scheme.activations is not None and scheme.activations.name != "int8":
            name = scheme.activations.name
            return f"activations {name} cannot be combined with integer weights; use int8, or format: native"
        if scheme.activation_scale == "static" and not int_quantized.suits(scheme):
            return (
                "a static scale of the inputs is stored only with int8 weights per channel or tensor; "
                "use activation_scale: token, or format: native"
            )
        return pack_quantized.refuses(scheme, shape)

    def adapt(self, packed: PackedCodes) -> PackedCodes:
        return pack_quantized.adapt(packed)

    def encode(self, packed: PackedCodes, activations: Grid | None) -> dict[str, Tensor]:
        if int_quantized.suits(Scheme.of(packed, activations)):
            return int_quantized.encode(packed)
        return pack_quantized.encode(packed)

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        if "weight_packed" in tensors:
            return pack_quantized.decode(tensors, scheme)
        return int_quantized.decode(tensors, scheme)

    def config(self, schemes: Mapping[str, Scheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name, scheme in schemes.items():
            group = self._group(scheme)
            groups.setdefault(repr(group), (group, []))[1].append(name)
        if not groups:
            return None
        single = len(groups) == 1
        config_groups = {
            f"group_{i}": {"targets": ["Linear"] if single else names, **group}
            for i, (group, names) in enumerate(groups.values())
        }
        formats = {group["format"] for group, _ in groups.values()}
        found = {
            "quant_method": "compressed-tensors",
            "version": WRITES_AS,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": ignore,
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "transform_config": {},
            "config_groups": config_groups,
        }
        if any(not scheme.symmetric and scheme.activations is None for scheme in schemes.values()):
            # transformers 5.23 shapes packed zero points wrongly unless it multiplies the weights out while loading.
            found["run_compressed"] = False
        return found

    def _group(self, scheme: Scheme) -> dict[str, Any]:
        layout = int_quantized.NAME if int_quantized.suits(scheme) else pack_quantized.NAME
        inputs = None if scheme.activations is None else pack_quantized.input_arguments(scheme)
        weights = pack_quantized.weight_arguments(scheme)
        return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": layout}

    def schemes(self, config: Mapping[str, Any], names: list[str]) -> dict[str, Scheme]:
        found: dict[str, Scheme] = {}
        for group in config["config_groups"].values():
            weights, inputs = group["weights"], group.get("input_activations")
            grouped = weights["strategy"] == "group"
            scheme = Scheme(
                GRIDS[f"int{weights['num_bits']}"],
                weights["group_size"] if grouped else weights["strategy"],
                weights["symmetric"],
                activations=None if inputs is None else GRIDS[f"int{inputs['num_bits']}"],
                activation_scale="token" if inputs is None or inputs["dynamic"] else "static",
            )
            everywhere = "Linear" in group["targets"]
            targets = set(group["targets"])
            ignored = set(config.get("ignore", []))
            found |= {name: scheme for name in names if name in targets or (everywhere and name not in ignored)}
        return found
