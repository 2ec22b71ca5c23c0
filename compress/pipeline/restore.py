"""Restore a block of a killed run from its shard."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from compress.checkpoint.checkpoint import fill, fill_caches
from compress.checkpoint.codec import ShardEntry
from compress.checkpoint.formats.base import Format
from compress.checkpoint.sources.stored import stored_in
from compress.checkpoint.tensors import StoredTensors
from compress.layers.linear import CompressedLinear, linears, renew_linear, replace_linear
from compress.layers.scheme import LayerScheme
from compress.models.caches.quantized import SCALES, cache_records
from compress.models.caches.scheme import CacheScheme
from compress.models.structure.blocks import Block
from compress.models.tensors import assign


def restore_block(
    block: Block,
    entry: ShardEntry,
    folder: Path,
    targets: Collection[str],
    format_: Format,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Restore a block from its shard.

    Args:
        targets: full names of linears that passes compress.
        dtype: dtype of computation.

    Returns:
        False, without a change, if the file is missing or changed.
    """
    if not entry.is_unchanged(folder):
        return False
    mapped = StoredTensors(stored_in(folder / entry.file), dtype, device)
    for name, layer in linears(block.module).items():
        if isinstance(layer, CompressedLinear):  # from an earlier segment: discard it
            renew_linear(block.module, name)
        elif f"{block.name}.{name}" in targets:
            replace_linear(block.module, name)
    schemes = {name: LayerScheme.from_json(values) for name, values in entry.schemes.items()}
    fill(block.module, block.name + ".", mapped.read_raw(entry.names), schemes, format_, dtype)
    present = cache_records(block.name, block.module)
    caches = {n: CacheScheme.from_json(record["scheme"]) for n, record in entry.caches.items() if n not in present}
    scales = mapped.read([name for name in mapped.files if name.endswith(SCALES)])
    fill_caches(block.module, block.name + ".", scales, caches)
    _assign_dense(block, mapped, schemes)
    return True


def _assign_dense(block: Block, mapped: StoredTensors, schemes: Mapping[str, LayerScheme]) -> None:
    """Assign the tensors that are stored dense."""
    tensors = mapped.read(list(mapped.files))
    for name, layer in linears(block.module).items():
        full = f"{block.name}.{name}"
        if isinstance(layer, CompressedLinear) and full not in schemes:
            weight = tensors.pop(f"{full}.weight")
            layer.put(weight.T if layer.transposed else weight)
    state_names = {f"{block.name}.{name}" for name in block.module.state_dict()}
    assign(block.module, {n.removeprefix(block.name + "."): t for n, t in tensors.items() if n in state_names})
