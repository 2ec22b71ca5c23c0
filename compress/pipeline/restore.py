"""Restore a block of a killed run from its shard."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from compress.checkpoint.caches import install_policies
from compress.checkpoint.codec import ShardEntry
from compress.checkpoint.formats.base import Format
from compress.checkpoint.layers import StoredLayers
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.sources.stored import by_owner, stored_in
from compress.checkpoint.tensors import StoredTensors
from compress.layers.linear import CompressedLinear, linears
from compress.layers.scheme import LayerScheme
from compress.models.caches.attentions import cache_policies
from compress.models.structure.blocks import Block


def restore_block(
    block: Block,
    entry: ShardEntry,
    folder: Path,
    targets: Collection[str],
    format_: Format,
    opened: OpenModel,
) -> bool:
    """Restore a block from its shard.

    Args:
        targets: full names of linears that passes compress.
        opened: the model of the block.

    Returns:
        False, without a change, if the file is missing or changed.
    """
    if not entry.is_unchanged(folder):
        return False
    tensors = StoredTensors(stored_in(folder / entry.file), opened.dtype, opened.device, within=opened.weights.within)
    schemes = {name: LayerScheme.from_json(values) for name, values in entry.schemes.items()}
    present = {f"{block.name}.{name}".removesuffix(".") for name in cache_policies(block.module)}
    policies = {name: policy for name, policy in entry.cache_policies().items() if name not in present}
    install_policies(block.module, f"{block.name}.", tensors, policies)
    packed = {name for names in by_owner(tensors.files, schemes).values() for name in names}
    dense_names = (tensors.files.keys() - packed) | {name for name in packed if name.endswith(".bias")}
    earlier = {n for n, layer in linears(block.module).items() if isinstance(layer, CompressedLinear)}
    masked = {*targets, *(f"{block.name}.{name}" for name in earlier)} - schemes.keys()
    StoredLayers(tensors, dense_names, format_, schemes).bring(block, masked)
    return True
