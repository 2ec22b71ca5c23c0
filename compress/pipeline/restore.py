"""Compressed blocks brought back from the shards of a run that was killed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from compress.formats.base import CacheScheme, Format
from compress.formats.containers.files import file_sha256
from compress.model.kv_cache import SCALES
from compress.model.linear import CompressedLinear, linears, replace_linear
from compress.model.open.load import fill, fill_caches
from compress.model.open.opening import Mapped, assign, stored_in
from compress.model.structure.blocks import Block
from compress.pipeline.checkpoint import ShardEntry
from compress.weights.layer import LayerScheme


def restore(
    block: Block, entry: ShardEntry, folder: Path, targets: Collection[str], format_: Format, dtype: torch.dtype,
    device: torch.device,
) -> bool:  # fmt: skip
    """Put a block's shard into the model, the linears called `targets` compressed; False where it is not whole."""
    path = folder / entry.file
    if not path.exists() or file_sha256(path) != entry.sha256:
        return False
    mapped = Mapped(stored_in(path), dtype, device)
    for name in linears(block.module):
        if f"{block.name}.{name}" in targets:
            replace_linear(block.module, name)
    schemes = {name: LayerScheme.from_json(values) for name, values in entry.schemes.items()}
    fill(block.module, block.name + ".", mapped.read_raw(entry.names), schemes, format_, dtype)
    caches = {name: CacheScheme.from_json(record["scheme"]) for name, record in entry.caches.items()}
    scales = mapped.read([name for name in mapped.files if name.endswith(SCALES)])
    fill_caches(block.module, block.name + ".", scales, caches)
    _assign_dense(block, mapped, schemes)
    return True


def _assign_dense(block: Block, mapped: Mapped, schemes: Mapping[str, LayerScheme]) -> None:
    """Tensors that are stored as they are computed with."""
    tensors = mapped.read(list(mapped.files))
    for name, layer in linears(block.module).items():
        full = f"{block.name}.{name}"
        if isinstance(layer, CompressedLinear) and full not in schemes:
            weight = tensors.pop(f"{full}.weight")
            layer.put(weight.T if layer.transposed else weight)
    held = {f"{block.name}.{name}" for name in block.module.state_dict()}
    assign(block.module, {n.removeprefix(block.name + "."): t for n, t in tensors.items() if n in held})
