"""What a shard of a checkpoint holds: its record, and the codec that encodes a part of a model in a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.checkpoint.containers.files import file_sha256
from compress.checkpoint.formats.base import Ends, Format
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.save import block_tensors, outside_tensors, store_as_planned
from compress.layers.linear import CompressedLinear, linears, scheme_of
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.models.caches.attentions import cache_digests, cache_policies
from compress.models.caches.base import CachePolicy, read_policy
from compress.models.paged import paged
from compress.models.structure.blocks import Block
from compress.models.structure.ends import compressed_ends
from compress.numerics.sparse.positions import SparsePolicy


@dataclass
class ShardEntry:
    """Record of one shard in the manifest of a run.

    Attributes:
        file: file name.
        sha256: digest of the file.
        names: names of its tensors.
        size_bytes: bytes of its tensors.
        digests: sha256 of the stored form of each compressed layer, by full name.
        schemes: storage scheme of each compressed layer as JSON values, by full name.
        results: results of passes on the layers, for the report.
        journal: journal entries about the block.
        caches: {policy, sha256} of each attention module with a cache policy, by full name.
        masked: full names of the pruned linears.
        masks_as_zeros: those among them whose mask no tensor stores; their zeros are the mask.
        state: what the tensors of an exact state do not say (`compress.checkpoint.exact`); empty in a checkpoint.
    """

    file: str
    sha256: str
    names: list[str]
    size_bytes: int
    digests: dict[str, str] = field(default_factory=dict)
    schemes: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)
    masked: list[str] = field(default_factory=list)
    masks_as_zeros: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def is_unchanged(self, folder: Path) -> bool:
        """Return whether the file exists in a folder with the recorded digest."""
        path = folder / self.file
        return path.exists() and file_sha256(path) == self.sha256

    def cache_policies(self) -> dict[str, CachePolicy]:
        """Read the cache policies of attention modules, by full name."""
        return {name: read_policy(record["policy"]) for name, record in self.caches.items()}


@dataclass
class ShardContent:
    """Tensors of a shard by name, and values of `ShardEntry` fields by field name."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]


@dataclass(frozen=True)
class Outside:
    """The tensors outside of blocks in the form in which they are written.

    Attributes:
        ends: names of the embedding and the LM head, with configuration and tokenizer.
        layers: compressed layers among embedding and LM head, by name.
        rounded: codes of dense weights that the format quantizes, by name.
    """

    ends: Ends
    layers: Mapping[str, CompressedLinear]
    rounded: Mapping[str, CodesPart] = field(default_factory=dict)


class Codec(Protocol):
    """The form in which a shard holds its part of a model."""

    def encode_block(self, block: Block) -> ShardContent:
        """Return the content of the shard of a block."""
        ...

    def encode_outside(self, opened: OpenModel, outside: Outside) -> ShardContent:
        """Return the content of the shard with the tensors outside of blocks."""
        ...


@dataclass
class FormatCodec:
    """Store a model in a checkpoint format.

    Attributes:
        storage: dtype of dense tensors, and of scales unless the format fixes theirs.
        sparse: policy for storing pruned weights in packed sparse form.
        within: folder of the files that hold encoded tensors until they are written; None: they are in memory.
        accept: takes the name of a block and the final schemes of its linears by full name; raises an error for those
            that must not be written.
    """

    format: Format
    storage: torch.dtype
    sparse: SparsePolicy = "auto"
    accept: Callable[[str, Mapping[str, LayerScheme]], None] | None = None
    within: Path | None = None

    def encode_block(self, block: Block) -> ShardContent:
        """Convert pruned linears to packed sparse weights in place if the policy says so, and encode the block."""
        if self.format.sparse:
            store_as_planned(block.name, block.module, self.storage, self.sparse, self.within)
        layers = {f"{block.name}.{name}": layer for name, layer in linears(block.module).items()}
        if self.accept is not None:
            self.accept(block.name, {name: scheme_of(layer) for name, layer in layers.items()})
        encoded = block_tensors(block.name, block.module, self.format, self.storage)
        tensors = dict(sorted(paged(encoded, self.within)))
        compressed = {name: layer for name, layer in layers.items() if isinstance(layer, CompressedLinear)}
        record = _layer_records(compressed) | {"caches": _cache_records(block)}
        return ShardContent(tensors, record)

    def encode_outside(self, opened: OpenModel, outside: Outside) -> ShardContent:
        """Encode the tensors outside of blocks."""
        tensors = outside_tensors(opened, outside.layers, self.format, self.storage, outside.rounded)
        if self.format.file is None:
            tensors |= {name: stored.read() for name, stored in sorted(opened.undeclared.items())}
        return ShardContent(tensors, _layer_records(outside.layers))


def _layer_records(layers: Mapping[str, CompressedLinear]) -> dict[str, Any]:
    """Digests, schemes and names of pruned linears of the compressed layers of a shard."""
    stored = {name: layer for name, layer in layers.items() if not layer.scheme.plain}
    return {
        "digests": {name: layer.sha256() for name, layer in stored.items()},
        "schemes": {name: layer.scheme.to_json() for name, layer in stored.items()},
        "masked": [name for name, layer in layers.items() if layer.positions is not None],
        "masks_as_zeros": [name for name, layer in layers.items() if layer.mask_words is not None],
    }


def _cache_records(block: Block) -> dict[str, dict[str, Any]]:
    """The records of all attention modules of a block that have a cache policy."""
    digests = cache_digests(block.module)
    return {
        f"{block.name}.{name}".removesuffix("."): {"policy": policy.to_json(), "sha256": digests[name]}
        for name, policy in cache_policies(block.module).items()
    }


def layer_schemes(shards: Mapping[str, ShardEntry], opened: OpenModel) -> dict[str, LayerScheme]:
    """Return the storage scheme of every compressed layer, in the order of the model."""
    values = {name: scheme for entry in shards.values() for name, scheme in entry.schemes.items()}
    names = [*opened.linear_names(), *compressed_ends(opened.model)]
    return {name: LayerScheme.from_json(values[name]) for name in names if name in values}
