"""What a config of compressed-tensors states about groups of layers: closed lists of its keys, and their schemes.

The keys are those of QuantizationConfig, QuantizationScheme and QuantizationArgs (compressed-tensors 0.20).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from compress.checkpoint.formats.accepted import (
    FLAG,
    INTEGER,
    NULL,
    OBJECT,
    TEXT,
    TEXTS,
    UNUSED,
    Accepted,
    check_keys,
    only,
    without_effect,
)
from compress.checkpoint.formats.layouts.layout import Layout
from compress.checkpoint.formats.patterns import matches
from compress.layers.parts.codes import CodesScheme
from compress.layers.transforms.rounding import RoundingScheme
from compress.numerics.quant.grids import GRIDS, Grid

INPUTS = {(4, "int"): GRIDS["int4"], (8, "int"): GRIDS["int8"], (8, "float"): GRIDS["fp8_e4m3"]}
"""The grid of inputs by the bits and the type that a config names, if their scales are floats."""
FP8, E8M0 = "torch.float8_e4m3fn", "torch.uint8"
"""The dtypes of coded scales."""
BLOCK_INPUTS = {4: GRIDS["mxfp4"], 8: GRIDS["mxfp8"]}
"""The grid of float inputs in groups with powers of two as scales, by their bits."""
LOCAL = "local"
"""The `dynamic` of inputs whose scales of groups are dynamic, relative to a static global scale (NVFP4)."""
CACHE: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}

DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "actorder": None}
"""The values of QuantizationArgs that a config may omit (compressed-tensors 0.20)."""
ARGUMENTS: dict[str, Accepted] = {
    "num_bits": INTEGER,
    "type": only("int", "float"),
    "symmetric": FLAG,
    "strategy": TEXT | NULL,
    "group_size": INTEGER | NULL,
    "block_structure": NULL,
    "actorder": UNUSED,
    **without_effect("observer", "observer_kwargs"),
}
"""The keys of QuantizationArgs with the values that all its readers accept."""
WEIGHTS = ARGUMENTS | {
    "dynamic": UNUSED,
    "actorder": UNUSED | only("weight", "static", "group", "dynamic"),
    "block_structure": NULL | Accepted("two positive integers", lambda value: len(_block(value)) == 2),
    **without_effect("scale_dtype", "zp_dtype"),  # those of the tensors
}
ACTIVATIONS = ARGUMENTS | {
    "num_bits": only(4, 8),
    "dynamic": FLAG | only(LOCAL),
    "scale_dtype": NULL | only(FP8, E8M0),
    "zp_dtype": NULL | only("torch.int8", FP8, E8M0),
}
CACHED = ARGUMENTS | {key: only(value) for key, value in CACHE.items()}
CACHED |= {"type": only("int", "float"), "group_size": NULL, "scale_dtype": NULL, "zp_dtype": NULL}
GROUP: dict[str, Accepted] = {
    "targets": TEXTS,
    "weights": OBJECT,
    "input_activations": OBJECT | NULL,
    "output_activations": NULL,
    "format": TEXT | NULL,
}
SPARSITY: dict[str, Accepted] = {
    "format": only("dense"),
    **without_effect("global_sparsity", "sparsity_structure", "registry_requires_subclass", "targets", "ignore"),
}
TRANSFORMS: dict[str, Accepted] = {"config_groups": UNUSED}
STATIC, DYNAMIC = ("tensor",), ("token", "group")
"""The strategies of inputs that a layer expresses."""
KEYS: dict[str, Accepted] = {
    "quant_method": TEXT,
    "format": TEXT,
    "quantization_status": only("compressed", "frozen"),
    "config_groups": OBJECT,
    "ignore": TEXTS | NULL,
    "kv_cache_scheme": OBJECT | NULL,
    "sparsity_config": OBJECT | NULL,
    "transform_config": OBJECT | NULL,
    "moe_sparsity_config": UNUSED,
    **without_effect("version", "global_compression_ratio", "run_compressed", "dequantize"),
    **without_effect("use_optimized_inference"),
}
"""The keys of a `quantization_config`."""


def check_other_parts(config: Mapping[str, Any]) -> None:
    """Check the parts of a config that state no group. Raises ValueError."""
    check_keys(config.get("sparsity_config") or {}, SPARSITY, "sparsity_config.")
    check_keys(config.get("transform_config") or {}, TRANSFORMS, "transform_config.")


def cache_grid(record: Any) -> Grid:
    """Return the grid of a `kv_cache_scheme`. Raises ValueError for another than `CACHE`, but for its type."""
    check_keys(record, CACHED, "kv_cache_scheme.")
    return INPUTS[8, (DEFAULTS | dict(record))["type"]]


def specificity(target: str, name: str) -> int:
    """How specifically a target, or an ignored name, means a linear: name 3, pattern 2, class 1; 0: not at all.

    Raises ValueError for an invalid pattern.
    """
    if target.startswith("re:"):
        return 2 * matches(target.removeprefix("re:"), name)
    return 3 * (target == name) or int(target == "Linear")


def ignored(names: Sequence[str], compressed: Collection[str]) -> list[str]:
    """Return the `ignore` list of dense modules: a pattern for modules of one kind, if it matches no compressed layer.

    Args:
        names: as of `Format.config`.
        compressed: names of the compressed layers.
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_pattern_of(name), []).append(name)
    entries = []
    for pattern, alike in kinds.items():
        shared = (len(alike) > 1 or alike[0].endswith(".")) and not any(re.match(pattern, name) for name in compressed)
        entries += [f"re:{pattern}"] if shared else alike
    return entries


def _pattern_of(name: str) -> str:
    """Return a pattern of the modules with this name in all blocks, whatever precedes the blocks.

    A name outside of blocks stays whole, but for its numbers.
    """
    parts = name.split(".")
    inside_from = next((i + 1 for i, part in enumerate(parts[:-1]) if part.isdecimal()), 0)
    inside = [r"\d+" if part.isdecimal() else re.escape(part) if part else ".*" for part in parts[inside_from:]]
    return (r".*\." if inside_from else "") + r"\.".join(inside) + "$"


def _block(value: Any) -> list[int]:
    """Return the sizes of a block, which early versions write as '128x128'; empty for another value."""
    sizes = value.split("x") if isinstance(value, str) else value
    valid = isinstance(sizes, list) and all(isinstance(size, int) or str(size).isdecimal() for size in sizes)
    return [int(size) for size in sizes] if valid else []


def _strategy(arguments: Mapping[str, Any], accepted: Collection[str], place: str) -> str:
    """Return what shares a scale; a config may omit it (compressed-tensors, QuantizationArgs). Raises ValueError."""
    size, stated = arguments.get("group_size"), arguments.get("strategy")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = inferred if stated is None else stated
    check_keys({"strategy": strategy}, {"strategy": only(*accepted)}, place)
    sizes = only(None, -1) if strategy == "channel" else INTEGER if "group" in strategy else NULL
    check_keys({"group_size": size}, {"group_size": sizes}, place)
    return strategy


def schemes_of_group(
    group: Mapping[str, Any], layouts: Mapping[str, Layout], default: Any, place: str
) -> tuple[CodesScheme, tuple[RoundingScheme, ...]]:
    """Read the scheme of the codes and those of the transforms from a config group.

    Args:
        group: the entry of `config_groups`.
        layouts: layouts by name.
        default: name of the layout of a group that states none.
        place: beginning of messages.

    Raises:
        ValueError: for what is not read.
    """
    check_keys(group, GROUP, place)
    name = group.get("format") or default
    if name not in layouts:
        readable = ", ".join(layouts)
        raise ValueError(f"the layout {name!r} of compressed-tensors cannot be read; known: {readable}")
    layout, inside = layouts[name], f"{place}weights."
    check_keys(group["weights"], WEIGHTS, inside)
    weights = DEFAULTS | dict(group["weights"])
    check_keys({key: weights[key] for key in layout.states}, layout.states, inside)
    strategy = _strategy(weights, layout.strategies, inside)
    size: Any = weights["group_size"] if "group" in strategy else strategy
    rows = 1
    if strategy == "block":
        rows, size = _block(weights["block_structure"])
    indexed = weights.get("actorder") in ("group", "dynamic")
    codes = CodesScheme(layout.grid_of(weights), size, weights["symmetric"], indexed, rows=rows)
    inputs = group.get("input_activations")
    return codes, () if inputs is None else (_rounding(inputs, f"{place}input_activations."),)


def _rounding(arguments: Mapping[str, Any], place: str) -> RoundingScheme:
    """Read the scheme of the inputs. Raises ValueError for inputs that a layer does not express."""
    check_keys(arguments, ACTIVATIONS, place)
    inputs = DEFAULTS | dict(arguments)
    bits, kind = inputs["num_bits"], inputs["type"]
    if kind == "float" and (inputs["dynamic"] == LOCAL or inputs.get("scale_dtype") == E8M0):
        return _block_rounding(inputs, place)
    check_keys({"type": kind}, {"type": only(*(name for size, name in INPUTS if size == bits))}, place)
    check_keys(arguments, {**ACTIVATIONS, "dynamic": FLAG, "scale_dtype": NULL}, place)
    strategy = _strategy(inputs, DYNAMIC if inputs["dynamic"] else STATIC, place)
    if not inputs["dynamic"] or kind == "float":
        check_keys({"symmetric": inputs["symmetric"]}, {"symmetric": only(True)}, place)
    scale = "static" if not inputs["dynamic"] else "group" if strategy == "group" else "token"
    return RoundingScheme(INPUTS[bits, kind], scale, symmetric=inputs["symmetric"], group=inputs.get("group_size"))


def _block_rounding(inputs: Mapping[str, Any], place: str) -> RoundingScheme:
    """Read the scheme of inputs with coded scales of groups. Raises ValueError for another combination of values."""
    local = inputs["dynamic"] == LOCAL
    grid = GRIDS["nvfp4"] if local else BLOCK_INPUTS[inputs["num_bits"]]
    accepted = {
        "num_bits": only(grid.bits),
        "dynamic": only(LOCAL if local else True),
        "symmetric": only(True),
        "strategy": only("tensor_group" if local else "group"),
        "group_size": only(grid.group_size),
        "scale_dtype": NULL | only(FP8) if local else only(E8M0),
    }
    check_keys({key: inputs.get(key) for key in accepted}, accepted, place)
    return RoundingScheme(grid, "local" if local else "group", group=grid.group_size)
