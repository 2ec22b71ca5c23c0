"""CheckpointWriter and TensorWriter: the only code that writes a model to disk.

Each finished block becomes one shard of safetensors; `close` adds the tensors outside of blocks, the index, the
configuration, the tokenizer and the digests. A codec decides what a shard holds: `codec.FormatCodec` the stored form of
a checkpoint format, `exact.ExactCodec` the exact state of a model between two segments of a run. `TensorWriter` writes
tensors that no model describes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.caches import policy_entries, stated_policy
from compress.checkpoint.checkpoint import MASKED_KEY
from compress.checkpoint.codec import Codec, Outside, ShardContent, ShardEntry, layer_schemes
from compress.checkpoint.containers.digests import LOADED, write_digests
from compress.checkpoint.containers.files import RESUMES, atomic, reason_of, write_json, write_text
from compress.checkpoint.containers.safetensors_writing import (
    Headers,
    shard_name,
    write_index,
    write_shard,
    write_streamed,
)
from compress.checkpoint.formats.base import Format
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.save import check_together, dense_modules, named_as_stored
from compress.errors import SaveError
from compress.layers.linear import linears
from compress.layers.scheme import LayerScheme
from compress.models.structure.blocks import Block
from compress.numerics.dtypes import dtype_name
from compress.version import __version__

OUTSIDE = "outside"
"""The key of the shard with all tensors outside of blocks."""
TOKENIZER_CONFIG = "tokenizer_config.json"
CIRCUMSTANCES = ("is_local", "local_files_only", "name_or_path")
"""What transformers writes to `TOKENIZER_CONFIG` about how a tokenizer was read: offline, or from a local folder."""


def _do_nothing() -> None:
    return


@dataclass
class CheckpointWriter:
    """Write a model block by block.

    Files are written to `staging` and read from `folder`; `publish` moves them from one to the other. Without
    `publish` both are one folder.

    Attributes:
        shards: records of the shards by block name, and of `OUTSIDE`.
    """

    opened: OpenModel
    codec: Codec
    folder: Path
    staging: Path
    shards: dict[str, ShardEntry] = field(default_factory=dict)
    publish: Callable[[], None] = _do_nothing

    def add(self, block: Block) -> ShardEntry:
        """Write the shard of a block, and return its record. Raises SaveError if the disk is full or read-only."""
        content = self.codec.encode_block(block)
        return self._write(block.name, shard_name(block.index + 2, self._count), content)

    def add_outside(self, outside: Outside) -> ShardEntry:
        """Write the shard of the tensors outside of blocks, and return its record. Raises as `add`."""
        content = self.codec.encode_outside(self.opened, outside)
        return self._write(OUTSIDE, shard_name(1, self._count), content)

    def close(
        self, format_: Format, outside: Outside, dtype: torch.dtype, texts: Mapping[str, str] | None = None
    ) -> list[str]:
        """Write the tensors outside of blocks and all files other than shards.

        Args:
            dtype: dtype of computation that config.json states.
            texts: further files by relative path.

        Returns:
            Names of the shards that the one file of a one-file format (`Format.file`) has replaced; the caller removes
            them. `shards` refers to that file.

        Raises:
            TargetError: if the layers cannot be in one checkpoint of the format.
            SaveError: if writing fails.
        """
        self.add_outside(outside)
        self.publish()
        schemes = layer_schemes(self.shards, self.opened)
        check_together(format_, schemes)
        self.staging.mkdir(parents=True, exist_ok=True)
        digest = None
        if format_.file is not None:
            paths = {name: self.folder / entry.file for entry in self.shards.values() for name in entry.names}
            digest = format_.assemble(self.staging, outside.ends, schemes, paths)
        self._describe(format_, schemes, dtype, digest)
        for name, text in (texts or {}).items():
            (self.staging / name).parent.mkdir(exist_ok=True)
            write_text(self.staging / name, text)
        self.publish()
        if digest is None:
            return []
        replaced = [entry.file for entry in self.shards.values()]
        for entry in self.shards.values():
            entry.file, entry.sha256 = str(format_.file), digest
        return replaced

    @property
    def _count(self) -> int:
        return len(self.opened.blocks) + 1

    def _write(self, key: str, file: str, content: ShardContent) -> ShardEntry:
        self.staging.mkdir(parents=True, exist_ok=True)
        digest = write_shard(self.staging / file, content.tensors)
        size = sum(tensor.nbytes for tensor in content.tensors.values())
        self.shards[key] = ShardEntry(file, digest, list(content.tensors), size, **content.record)
        return self.shards[key]

    def _describe(
        self, format_: Format, schemes: Mapping[str, LayerScheme], dtype: torch.dtype, assembled: str | None
    ) -> None:
        """Write index, config.json, generation config, tokenizer, processor and digests.

        Args:
            assembled: sha256 of the one file of a one-file format.
        """
        digests = {entry.file: entry.sha256 for entry in self.shards.values()}
        if assembled is None:
            weight_files = [*digests, _write_index(self.staging, self.shards.values())]
        else:
            weight_files, digests = [str(format_.file)], {str(format_.file): assembled}
        tokenizer_files = _write_tokenizer(self.opened, self.staging)
        config = self._config(format_, schemes, dtype)
        write_json(self.staging / "config.json", config)
        texts = format_.files(config.get("quantization_config"))
        for name, text in texts.items():
            write_text(self.staging / name, text)
        write_digests(self.staging, [*weight_files, "config.json", *texts, *tokenizer_files], digests)

    def _config(self, format_: Format, schemes: Mapping[str, LayerScheme], dtype: torch.dtype) -> dict[str, Any]:
        """Return the content of config.json."""
        opened = self.opened
        policies = {name: policy for entry in self.shards.values() for name, policy in entry.cache_policies().items()}
        config = opened.config.to_dict()
        config.pop("_name_or_path", None)
        config["architectures"] = [type(opened.model).__name__]
        config["dtype"] = dtype_name(dtype)
        stated = stated_policy(opened.model, policies, format_)
        dense_names = dense_modules(opened, set(schemes), [self.folder / entry.file for entry in self.shards.values()])
        quantization = format_.config(named_as_stored(schemes, opened, format_), dense_names, __version__)
        if stated is not None:
            quantization = format_.state_cache(quantization, dense_names, stated)
        if quantization is not None:
            config["quantization_config"] = quantization
        config |= format_.entries(quantization, opened.config)
        if stated is None:
            config |= policy_entries(policies)
        pruned = {name for entry in self.shards.values() for name in entry.masked}
        recorded = set(config.pop(MASKED_KEY, ())) & linears(opened.model).keys() - pruned  # by the loaded checkpoint
        masked = [name for entry in self.shards.values() for name in entry.masks_as_zeros] + sorted(recorded)
        if masked:
            config[MASKED_KEY] = masked
        return config


def _write_index(folder: Path, shards: Collection[ShardEntry]) -> str:
    """Write the file that names the shard of every tensor, and return its name."""
    weight_map = {name: entry.file for entry in shards for name in entry.names}
    return write_index(folder, weight_map, sum(entry.size_bytes for entry in shards))


@dataclass
class TensorWriter:
    """Write a folder of tensors without a model: its class need not exist, and one tensor is in memory at a time.

    Attributes:
        folder: an empty folder.
        shards: records of the shards.
    """

    folder: Path
    shards: list[ShardEntry] = field(default_factory=list)

    def add(self, number: int, count: int, headers: Headers, tensors: Iterable[tuple[str, Tensor]]) -> ShardEntry:
        """Write shard `number` (from 1) of `count`.

        Args:
            headers: dtype and shape of every tensor by name.
            tensors: (name, tensor); each may be freed when the next one is asked for.

        Raises:
            SaveError: if writing fails.
        """
        file = shard_name(number, count)
        digest = write_streamed(self.folder / file, headers, tensors)
        size = sum(header.size_bytes for header in headers.values())
        self.shards.append(ShardEntry(file, digest, list(headers), size))
        return self.shards[-1]

    def close(self, config: Mapping[str, Any], copied: Mapping[str, Path], texts: Mapping[str, str]) -> None:
        """Write the index, config.json, other files and the digests of all files that are loaded.

        Args:
            config: the content of config.json.
            copied: files that are copied, by their relative paths.
            texts: further files by name.

        Raises:
            SaveError: if writing fails.
        """
        _write_index(self.folder, self.shards)
        write_json(self.folder / "config.json", config)
        for name, path in copied.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic(self.folder / name) as part:
                shutil.copyfile(path, part)
        for name, text in texts.items():
            write_text(self.folder / name, text)
        loaded = [path.name for path in self.folder.iterdir() if path.suffix in LOADED]
        write_digests(self.folder, loaded, {entry.file: entry.sha256 for entry in self.shards})


def write_probe(path: Path, probe: Mapping[str, Tensor], logits: Tensor) -> None:
    """Write the logits that a model computes for a sequence, to compare after reloading."""
    write_shard(path, {**probe, "logits": logits.cpu().contiguous()})


def _remove_circumstances(path: Path) -> None:
    """Remove from a tokenizer's configuration how it was read, which would change the digest of the checkpoint."""
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        plain = {key: value for key, value in config.items() if key not in CIRCUMSTANCES}
        if plain != config:
            path.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(opened: OpenModel, folder: Path) -> list[str]:
    """Write generation config, tokenizer and processor.

    Returns:
        Names of the files that are not in subfolders.

    Raises:
        SaveError: if writing fails.
    """
    generation = getattr(opened.model, "generation_config", None)
    files = [name for name in opened.side_files if "/" not in name]
    try:
        if generation is not None:
            generation.save_pretrained(folder)
            files.append("generation_config.json")
        if opened.tokenizer is not None:
            paths = [Path(path) for path in opened.tokenizer.save_pretrained(folder)]
            files += [path.name for path in paths if path.is_file() and path.parent == folder]
            _remove_circumstances(folder / TOKENIZER_CONFIG)
        for name, text in opened.side_files.items():
            if not (folder / name).exists():  # the tokenizer may write a template of its own
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SaveError(f"{error.filename or folder}: {reason_of(error)}; {RESUMES}") from error
    return files
