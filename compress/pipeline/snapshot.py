"""Snapshots: write the model between two segments of a run to files, and restore it exactly.

A checkpoint stores layers in their final form. A snapshot also stores state that later passes need and no checkpoint
contains: the mask of a dense weight, input scales and permutations of dense layers, the dtype and memory order of every
tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint.containers.files import file_sha256
from compress.checkpoint.containers.safetensors import write_shard
from compress.checkpoint.save import outside_state
from compress.checkpoint.sources.opening import InMemory, Mapped, OpenModel
from compress.checkpoint.sources.stored import by_owner, stored_in
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.models.caches.quantized import SCALES, round_cache, rounded_caches, scheme_of
from compress.models.caches.scheme import CacheScheme
from compress.models.reshape.reconfigure import build, replace_in_place, shapes, sketch
from compress.models.structure.blocks import find_blocks
from compress.models.structure.ends import compressed_ends, put_end, tie
from compress.models.tensors import assign
from compress.numerics.sparse.positions import PackedMask, SparseLayout

OUTSIDE = "outside"
"""The name of the part with all tensors outside of blocks."""


@dataclass
class Part:
    """A file with the tensors of a block, or with all tensors outside of blocks.

    record: the plain values of `state_of`. results, journal: the lines of this segment about the block, for the report.
    """

    file: str
    sha256: str
    record: dict[str, Any]
    results: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Snapshot:
    """The model after segment `segment` of a run; only some of its blocks until it is `complete`.

    parts: by block name and `OUTSIDE`. config: of the model. results: results of layers, by block, of all segments so
    far. journal: entries of all segments so far.
    """

    segment: int
    parts: dict[str, Part] = field(default_factory=dict)
    complete: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    journal: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Snapshot:
        """The inverse of `dataclasses.asdict`. Raises TypeError or KeyError."""
        parts = {name: Part(**part) for name, part in values["parts"].items()}
        return cls(**{**values, "parts": parts})

    def whole(self, folder: Path) -> bool:
        """Whether the snapshot is complete and all its files are unchanged."""
        return self.complete and all(_unchanged(folder, part) for part in self.parts.values())


def write_part(path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> Part:
    """Write the result of `state_of` to a file. Raises SaveError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Part(path.name, write_shard(path, tensors), record)


def read_part(folder: Path, part: Part, module: nn.Module, device: torch.device) -> bool:
    """Restore a part into its block; return False, without a change, if the file is missing or changed."""
    if not _unchanged(folder, part):
        return False
    restore_state(module, _read(folder / part.file, device), part.record)
    return True


def read_snapshot(snapshot: Snapshot, folder: Path, opened: OpenModel) -> bool:
    """Restore the whole model in memory; return whether its shape changes."""
    reshaped = _as_json(opened.config.to_dict()) != _as_json(snapshot.config)
    if reshaped:
        replace_in_place(opened.model, _placeholder_model(opened, snapshot.config))
        opened.blocks = find_blocks(opened.model)
    for block in opened.blocks:
        part = snapshot.parts[block.name]
        restore_state(block.module, _read(folder / part.file, opened.device), part.record)
    outside = snapshot.parts[OUTSIDE]
    restore_outside(opened.model, _read(folder / outside.file, opened.device), outside.record)
    tie(opened.model)
    opened.weights = InMemory(opened.weights.reading)
    return reshaped


def outside_of(opened: OpenModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `state_of`, for all tensors outside of blocks."""
    tensors, layers = outside_state(opened), {}
    for name, layer in compressed_ends(opened.model).items():
        found, layers[name] = _layer_state(layer)
        tensors |= {f"{name}.{key}": tensor for key, tensor in found.items()}
    return _in_order(tensors, {"layers": layers, "caches": {}})


def restore_outside(model: nn.Module, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """The inverse of `outside_of`."""
    tensors = {name: t.T if name in record["turned"] else t for name, t in tensors.items()}
    of_layers, others = _by_layer(tensors, record["layers"])
    for name, values in record["layers"].items():
        put_end(model, name, _layer_from(of_layers[name], values))
    restore_state(model, others, {**record, "layers": {}, "turned": []})


def state_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, plain values) of the whole state of a block, by names inside of the block."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, CompressedLinear):
            found, layers[name] = _layer_state(layer)
            tensors |= {f"{name}.{key}": tensor for key, tensor in found.items()}
    inside = tuple(f"{name}." for name in layers)
    tensors |= {name: t for name, t in module.state_dict().items() if not name.startswith(inside)}
    caches = {name: scheme.to_json() for name, scheme in rounded_caches(module).items()}
    return _in_order(tensors, {"layers": layers, "caches": caches})


def restore_state(module: nn.Module, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """The inverse of `state_of`; the linears of the block may be in any form."""
    tensors = {name: t.T if name in record["turned"] else t for name, t in tensors.items()}
    of_layers, others = _by_layer(tensors, record["layers"])
    for name, values in record["layers"].items():
        layer = _layer_from(of_layers[name], values)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, layer)
    assign(module, others)
    for name, values in record["caches"].items():
        attention = module.get_submodule(name)
        if scheme_of(attention) is None:
            of_keys, of_values = (tensors.get(f"{name}.{scale}".removeprefix(".")) for scale in SCALES)
            round_cache(attention, CacheScheme.from_json(values), (of_keys, of_values))


def _by_layer(
    tensors: Mapping[str, Tensor], layers: Iterable[str]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """(the tensors of each layer, by their names inside of it; all other tensors)."""
    names = by_owner(tensors, layers)
    found = {layer: {name.removeprefix(f"{layer}."): tensors[name] for name in own} for layer, own in names.items()}
    taken = {name for own in names.values() for name in own}
    return found, {name: tensor for name, tensor in tensors.items() if name not in taken}


def _layer_state(layer: CompressedLinear) -> tuple[dict[str, Tensor], dict[str, Any]]:
    values: dict[str, Any] = {"scheme": layer.scheme.to_json(), "transposed": layer.transposed}
    tensors = layer.tensors()
    if layer.mask_words is not None and layer.sparsity is not None:  # no part stores this mask
        tensors["mask"], values["kept"] = layer.mask_words, layer.sparsity.kept
    return tensors | ({} if layer.bias is None else {"bias": layer.bias}), values


def _layer_from(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> CompressedLinear:
    scheme = LayerScheme.from_json(values["scheme"])
    parts, transforms = scheme.read(tensors)
    layer = CompressedLinear(parts, tensors.get("bias"), values["transposed"])
    if "kept" in values:
        layer.put(parts, PackedMask(tensors["mask"], SparseLayout(values["kept"]), scheme.shape).mask())
    layer.read(layer.all_parts, transforms)
    return layer


def _in_order(tensors: Mapping[str, Tensor], record: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Make tensors contiguous; matrices in column-major order are stored transposed, and listed as 'turned'.

    The memory order must survive, because the last bit of a product may depend on it.
    """
    turned = [n for n, t in tensors.items() if t.ndim == 2 and not t.is_contiguous() and t.T.is_contiguous()]
    stored = {name: tensor.T if name in turned else tensor for name, tensor in tensors.items()}
    return {n: t.detach().cpu().contiguous() for n, t in stored.items()}, {**record, "turned": turned}


def _placeholder_model(opened: OpenModel, config: Mapping[str, Any]) -> nn.Module:
    """The model of a configuration, with placeholders for weights."""
    found = type(opened.config).from_dict(dict(config))
    drawn = sketch(opened.model, found)
    assert drawn is not None, "the configuration belongs to a model that existed"
    nothing = torch.empty((), dtype=opened.dtype, device=opened.device)
    return build(opened.model, found, {name: nothing.expand(shape) for name, shape in shapes(drawn).items()})


def _as_json(config: Mapping[str, Any]) -> Any:
    """A configuration after a round trip through JSON."""
    return json.loads(json.dumps(config))


def _unchanged(folder: Path, part: Part) -> bool:
    path = folder / part.file
    return path.exists() and file_sha256(path) == part.sha256


def _read(path: Path, device: torch.device) -> dict[str, Tensor]:
    mapped = Mapped(stored_in(path), torch.float32, device)
    return mapped.read_raw(list(mapped.files))
