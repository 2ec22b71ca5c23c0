"""save(model, folder): write a model in memory, compressed or not, as a checkpoint that `compress.load` reads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.containers.files import reason_of
from compress.checkpoint.containers.safetensors import shard_name, write_shard
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.save import (
    block_tensors,
    dense_linear_names,
    outside_tensors,
    stated_scheme,
    store_as_planned,
    stored_sparsity,
    write_description,
)
from compress.checkpoint.sources.files import read_processor
from compress.checkpoint.sources.load import load
from compress.checkpoint.sources.opening import InMemory, OpenModel
from compress.errors import OutputError, SaveError, UserError, VerificationError, did_you_mean
from compress.layers.embedding import layer_of
from compress.layers.linear import CompressedLinear, linears
from compress.layers.scheme import LayerScheme
from compress.models.caches.quantized import cache_records
from compress.models.caches.scheme import CacheScheme
from compress.models.computation import storage_of
from compress.models.structure.blocks import Block, find_blocks
from compress.models.structure.ends import compressed_ends
from compress.numerics.dtypes import DTYPES, dtype_name
from compress.numerics.sparse.positions import SparsePolicy
from compress.passes.contract.context import Run
from compress.pipeline.readers import check_together
from compress.sweep.install import adapt, adapt_block
from compress.sweep.quantized_embeddings import embeddings_of, quantized_embeddings
from compress.sweep.reference import twin
from compress.version import __version__


def save(
    model: PreTrainedModel,
    folder: str | Path,
    format: str = "native",
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str = "auto",
    sparse: SparsePolicy = "auto",
    embedding: str = "auto",
    head: str = "auto",
) -> Path:
    """Write a model in memory to a folder, which `compress.load` reads; returns the folder. The model does not change.

    format: as `save.format` of a recipe: 'native' stores all that passes make, 'compressed-tensors' is also read by
    transformers, 'dense' stores dequantized weights, which any program reads. tokenizer: is saved too, as are the files
    of a processor in the folder that the model was loaded from. dtype: of scales and dense tensors; 'auto': that of the
    model's parameters. sparse, embedding, head: as in `save` of a recipe.

    The folder appears when all its files are complete and the compressed layers were read back bit for bit.

    Raises UserError for an unknown format or dtype, OutputError for a folder with files, TargetError for a layer that
    the format cannot store, SaveError if writing fails, VerificationError if a layer reads back differently.
    """
    _check(format, dtype, sparse)
    first = next(model.parameters())
    target = FORMATS[format].configured(embedding, head)
    storage = storage_of(model) if dtype == "auto" else DTYPES[dtype]
    opened = OpenModel(model, find_blocks(model), InMemory(), tokenizer, "model", "", first.device, first.dtype)
    if model.name_or_path and (source := Path(model.name_or_path)).is_dir():
        opened.processor = read_processor(source)
    _check_outside(opened)
    if reason := target.refuses_model(embeddings_of(opened)):
        raise SaveError(f"save: format {format}: {reason}; use another format, such as native")
    run = Run(first.device, storage, format=target.stored_in(storage), sparse=sparse if target.sparse else "off")
    with _new_folder(Path(folder)) as part:
        written = _Written(part, opened, run)
        for block in opened.blocks:
            written.add(block)
        written.close()
        _verify(part, written.digests, dtype_name(first.dtype), first.device, Path(folder))
    return Path(folder)


def _check(format_: str, dtype: str, sparse: SparsePolicy) -> None:
    if format_ not in FORMATS:
        raise UserError(f"save: format {format_!r} is not known{did_you_mean(format_, FORMATS)}")
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"save: dtype {dtype!r} is not known{did_you_mean(dtype, ['auto', *DTYPES])}")
    if sparse == "always" and not FORMATS[format_].sparse:
        raise UserError(f"save: sparse: 'always' is not possible: format {format_} stores the zeros; use native")


def _check_outside(opened: OpenModel) -> None:
    """Raise SaveError for a compressed linear outside of the blocks, and for weights that are not in memory."""
    inside = {*opened.linear_names(), *compressed_ends(opened.model)}
    for name, layer in linears(opened.model).items():
        if isinstance(layer, CompressedLinear) and name not in inside:
            raise SaveError(
                f"save: {name} is compressed, but it is outside of the blocks; no format of compress holds it"
            )
    if missing := [name for name, tensor in opened.model.state_dict().items() if tensor.is_meta]:
        raise SaveError(f"save: {missing[0]} is on the meta device, without values; load the model first")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; on success it becomes `folder`, on an error it is removed."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{folder}: exists already; name a new or empty folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created or read ({error.strerror}); name another folder") from error
    try:
        yield part
        if folder.exists():
            folder.rmdir()
        os.replace(part, folder)
        folder.chmod(0o777 & ~_umask())  # a temporary folder is readable by its owner only
    except OSError as error:
        raise SaveError(f"{folder}: {reason_of(error)}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


@dataclass
class _Written:
    """The checkpoint so far: tensor names by file, and the schemes, digests and caches of layers by full name.

    files: sha256 of the shards by file.
    """

    folder: Path
    opened: OpenModel
    run: Run
    shards: dict[str, list[str]] = field(default_factory=dict)
    size_bytes: int = 0
    schemes: dict[str, LayerScheme] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    caches: dict[str, CacheScheme] = field(default_factory=dict)
    masked: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        """Write a block, in the form of the format; the block itself does not change."""
        run, copied = self.run, replace(block, module=twin(block.module))
        adapt_block(copied, run, self.opened.dtype)
        for layer in linears(copied.module).values():
            if isinstance(layer, CompressedLinear) and layer.scheme.folds:
                layer.absorb_inputs(stored_sparsity(layer, run.storage, run.sparse) is not None)
        store_as_planned(block.name, copied.module, run.storage, run.sparse)
        for name, layer in linears(copied.module).items():
            full = f"{block.name}.{name}"
            if isinstance(layer, CompressedLinear):
                self._stored(full, layer)
            if isinstance(layer, CompressedLinear) and layer.mask_words is not None:  # no part stores it
                self.masked.append(full)
        records = cache_records(block.name, copied.module)
        self.caches |= {name: CacheScheme.from_json(record["scheme"]) for name, record in records.items()}
        self._write(block.index + 2, block_tensors(block.name, copied.module, run.format, run.storage))

    def _stored(self, name: str, layer: CompressedLinear) -> None:
        """Record a layer in its stored form."""
        if not layer.scheme.plain:
            run = self.run
            layer.change_parts(lambda p: p.in_storage(run.scale_dtype if p.scheme.quantized else run.storage))
            self.schemes[name], self.digests[name] = layer.scheme, layer.sha256()

    def close(self) -> None:
        """Write the tensors outside of the blocks, and all other files."""
        opened, run = self.opened, self.run
        layers = {name: twin(layer) for name, layer in compressed_ends(opened.model).items()}
        for name, layer in layers.items():
            adapt(layer, run, opened.dtype, f"save: {name}")
            self._stored(name, layer)
        self._write(1, outside_tensors(opened, layers, run.format, run.storage, quantized_embeddings(opened, run)))
        stated = stated_scheme(opened.model, self.caches, run.format)
        ignore = dense_linear_names(opened, set(self.schemes))
        check_together(run.format, self.schemes)
        config = run.format.config(self.schemes, ignore, __version__, stated)
        own = self.caches if stated is None else {}
        if run.format.file is not None:
            paths = {name: self.folder / file for file, names in self.shards.items() for name in names}
            run.format.assemble(self.folder, embeddings_of(opened), self.schemes, paths)
            for file in self.shards:
                (self.folder / file).unlink()
            self.shards = {}
        about = config, run.storage, own, self.masked, self.files
        write_description(opened, self.folder, self.shards, self.size_bytes, *about)

    def _write(self, number: int, tensors: dict[str, Any]) -> None:
        name = shard_name(number, len(self.opened.blocks) + 1)
        self.files[name] = write_shard(self.folder / name, tensors)
        self.shards[name] = list(tensors)
        self.size_bytes += sum(tensor.nbytes for tensor in tensors.values())


def _verify(part: Path, digests: dict[str, str], dtype: str, device: torch.device, folder: Path) -> None:
    """Raise VerificationError unless all compressed layers read back bit for bit."""
    model, _ = load(part, dtype, device)
    for name, digest in digests.items():
        if layer_of(model.get_submodule(name)).sha256() != digest:
            raise VerificationError(f"{folder}: {name} differs after reloading")
