"""Restore a block of a killed run from its shard."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from compress.checkpoint.caches import install_policies
from compress.checkpoint.codec import ShardEntry
from compress.checkpoint.formats.base import Format
from compress.checkpoint.sources.load import fill
from compress.checkpoint.sources.opening import Mapped
from compress.checkpoint.sources.stored import stored_in
from compress.layers.linear import CompressedLinear, linears, renew_linear, replace_linear
from compress.layers.scheme import LayerScheme
from compress.models.caches.attentions import cache_policies
from compress.models.caches.base import tensor_names
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
    mapped = Mapped(stored_in(folder / entry.file), dtype, device)
    for name, layer in linears(block.module).items():
        if isinstance(layer, CompressedLinear):  # from an earlier segment: discard it
            renew_linear(block.module, name)
        elif f"{block.name}.{name}" in targets:
            replace_linear(block.module, name)
    schemes = {name: LayerScheme.from_json(values) for name, values in entry.schemes.items()}
    fill(block.module, block.name + ".", mapped.read_raw(entry.names), schemes, format_, dtype)
    present = {f"{block.name}.{name}".removesuffix(".") for name in cache_policies(block.module)}
    policies = {name: policy for name, policy in entry.cache_policies().items() if name not in present}
    stored_names = [name for name in tensor_names(policies) if name in mapped.files]
    install_policies(block.module, block.name + ".", mapped.read(stored_names), policies)
    _assign_dense(block, mapped, schemes)
    return True


def _assign_dense(block: Block, mapped: Mapped, schemes: Mapping[str, LayerScheme]) -> None:
    """Assign the tensors that are stored dense."""
    tensors = mapped.read(list(mapped.files))
    for name, layer in linears(block.module).items():
        full = f"{block.name}.{name}"
        if isinstance(layer, CompressedLinear) and full not in schemes:
            weight = tensors.pop(f"{full}.weight")
            layer.put(weight.T if layer.transposed else weight)
    state_names = {f"{block.name}.{name}" for name in block.module.state_dict()}
    assign(block.module, {n.removeprefix(block.name + "."): t for n, t in tensors.items() if n in state_names})
