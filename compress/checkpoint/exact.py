"""The exact state of a model between two segments of a run, as tensors and plain values.

A checkpoint format stores layers in their final form. An exact state also holds what later passes need and no
checkpoint contains: the mask of a dense weight, input scales and permutations of dense layers, the dtype and the memory
order of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint.codec import Outside, ShardContent, ShardEntry
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.save import outside_state
from compress.checkpoint.sources.stored import by_owner, stored_in
from compress.checkpoint.tensors import StoredTensors
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.models.caches.attentions import cache_policies, policy_of, set_policy
from compress.models.caches.base import read_policy
from compress.models.structure.blocks import Block
from compress.models.structure.ends import compressed_ends, put_end
from compress.models.tensors import assign
from compress.numerics.sparse.positions import PackedMask, SparseLayout


class ExactCodec:
    """Store the exact state of blocks (`Codec` of `CheckpointWriter`)."""

    def encode_block(self, block: Block) -> ShardContent:
        """Encode the state of a block, by names inside of the block."""
        tensors, state = state_of(block.module)
        return ShardContent(tensors, {"state": state})

    def encode_outside(self, opened: OpenModel, outside: Outside | None = None) -> ShardContent:
        """Encode the state of all tensors outside of blocks."""
        tensors, state = outside_of(opened)
        return ShardContent(tensors, {"state": state})


def restore_exact(folder: Path, entry: ShardEntry, module: nn.Module, device: torch.device) -> bool:
    """Restore the state of a block from its shard.

    Returns:
        False, without a change, if the file is missing or changed.
    """
    if not entry.is_unchanged(folder):
        return False
    restore_state(module, read_exact(folder / entry.file, device), entry.state)
    return True


def read_exact(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Read all tensors of a shard in their stored dtypes."""
    stored = stored_in(path)
    return StoredTensors(stored, torch.float32, device).read_raw(stored)


def outside_of(opened: OpenModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, plain values) of the state of all tensors outside of blocks."""
    tensors, layers = outside_state(opened), {}
    for name, layer in compressed_ends(opened.model).items():
        layer_tensors, layers[name] = _layer_state(layer)
        tensors |= {f"{name}.{key}": tensor for key, tensor in layer_tensors.items()}
    return _in_order(tensors, {"layers": layers, "caches": {}})


def restore_outside(model: nn.Module, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Restore what `outside_of` returned."""
    tensors = {name: t.T if name in record["turned"] else t for name, t in tensors.items()}
    tensors_by_layer, dense_tensors = _by_layer(tensors, record["layers"])
    for name, values in record["layers"].items():
        put_end(model, name, _layer_from(tensors_by_layer[name], values))
    restore_state(model, dense_tensors, {**record, "layers": {}, "turned": []})


def state_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, plain values) of the state of a block, by names inside of the block."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, CompressedLinear):
            layer_tensors, layers[name] = _layer_state(layer)
            tensors |= {f"{name}.{key}": tensor for key, tensor in layer_tensors.items()}
    prefixes = tuple(f"{name}." for name in layers)
    tensors |= {name: t for name, t in module.state_dict().items() if not name.startswith(prefixes)}
    caches = {name: policy.to_json() for name, policy in cache_policies(module).items()}
    return _in_order(tensors, {"layers": layers, "caches": caches})


def restore_state(module: nn.Module, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Restore what `state_of` returned; the linears of the block may be in any form."""
    tensors = {name: t.T if name in record["turned"] else t for name, t in tensors.items()}
    tensors_by_layer, dense_tensors = _by_layer(tensors, record["layers"])
    for name, values in record["layers"].items():
        layer = _layer_from(tensors_by_layer[name], values)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, layer)
    assign(module, dense_tensors)
    for name, values in record["caches"].items():
        attention, policy = module.get_submodule(name), read_policy(values)
        if policy_of(attention) is None:
            set_policy(attention, policy, {t: tensors[f"{name}.{t}".removeprefix(".")] for t in policy.tensors()})


def _by_layer(
    tensors: Mapping[str, Tensor], layers: Iterable[str]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Return the tensors of each layer, by their names inside of it, and all other tensors."""
    names_by_layer = by_owner(tensors, layers)
    tensors_by_layer = {
        layer: {name.removeprefix(f"{layer}."): tensors[name] for name in names}
        for layer, names in names_by_layer.items()
    }
    layer_names = {name for names in names_by_layer.values() for name in names}
    return tensors_by_layer, {name: tensor for name, tensor in tensors.items() if name not in layer_names}


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
