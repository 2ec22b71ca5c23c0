"""save(model, folder): write a model in memory, compressed or not, as a checkpoint that `compress.load` reads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.blockwise.install import adapt, adapt_block
from compress.blockwise.quantized_embeddings import embeddings_of, quantized_embeddings
from compress.blockwise.reference import twin
from compress.checkpoint.codec import FormatCodec, Outside, ShardEntry
from compress.checkpoint.containers.files import RESUMES, check_output_folder, reason_of, user_path
from compress.checkpoint.formats import FORMATS, unknown_format
from compress.checkpoint.load import load
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.save import store_as_planned, stored_sparsity
from compress.checkpoint.sources.files import read_sentence_files, read_side_files
from compress.checkpoint.writer import CheckpointWriter
from compress.errors import OutputError, SaveError, UserError, VerificationError
from compress.layers.embedding import layer_of
from compress.layers.linear import CompressedLinear, linears
from compress.models.computation import storage_of
from compress.models.experts import open_experts, stored_names
from compress.models.structure.blocks import Block
from compress.models.structure.ends import compressed_ends
from compress.numerics.dtype_names import dtype_hint
from compress.numerics.dtypes import DTYPES, dtype_name
from compress.numerics.sparse.positions import SparsePolicy
from compress.passes.contract.context import Run


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
    parameter = next(model.parameters())
    target = FORMATS[format].configured(embedding, head)
    storage = storage_of(model) if dtype == "auto" else DTYPES[dtype]
    opened = OpenModel.in_memory(model, tokenizer)
    if model.name_or_path and (source := Path(model.name_or_path)).is_dir():
        own_code = type(model).__module__.startswith("transformers_modules")
        opened.side_files = read_side_files(source, own_code) | read_sentence_files(source)[0]
    _check_outside(opened)
    if reason := target.refuses_model(embeddings_of(opened)):
        raise SaveError(f"save: format {format}: {reason}; use another format, such as native")
    run = Run(parameter.device, storage, format=target.stored_in(storage), sparse=sparse if target.sparse else "off")
    folder = user_path(folder)
    with new_folder(folder) as part:
        digests = digests_of(write_checkpoint(opened, run, part, storage))
        _verify(part, digests, dtype_name(parameter.dtype), parameter.device, folder)
    return folder


def write_checkpoint(opened: OpenModel, run: Run, folder: Path, dtype: torch.dtype) -> dict[str, ShardEntry]:
    """Write a model in memory to a folder; the model does not change.

    Args:
        opened: the model.
        run: with the format, the storage dtype and the policy for sparse weights.
        folder: an empty folder, or one that does not exist.
        dtype: the dtype of computation that config.json states.

    Returns:
        The records of the shards.

    Raises:
        TargetError: for a layer that the format cannot store.
        SaveError: if writing fails.
    """
    writer = CheckpointWriter(opened, FormatCodec(run.format, run.storage, run.sparse), folder, folder)
    for block in opened.blocks:
        writer.add(_block_to_write(block, opened, run))
    for name in writer.close(run.format, _outside_to_write(opened, run), dtype):
        (folder / name).unlink()
    return writer.shards


def digests_of(shards: Mapping[str, ShardEntry]) -> dict[str, str]:
    """Return the sha256 of every compressed layer by name, from the records of shards."""
    return {name: digest for entry in shards.values() for name, digest in entry.digests.items()}


def _check(format_: str, dtype: str, sparse: SparsePolicy) -> None:
    if format_ not in FORMATS:
        raise UserError(f"save: {unknown_format(format_)}")
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"save: dtype {dtype!r} is not known{dtype_hint(dtype)}")
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


def check_new_folder(folder: Path) -> None:
    """Raise OutputError unless a checkpoint can be written to the folder: it is missing or empty."""
    try:
        is_used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created or read ({error.strerror}); name another folder") from error
    if is_used:
        raise OutputError(f"{folder}: exists already; name a new or empty folder")
    check_output_folder(folder)


RESTARTS = "nothing was written; free disk space, or name another folder, and start again"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; on success it becomes `folder`, on an error it is removed."""
    check_new_folder(folder)
    try:
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
        raise SaveError(f"{folder}: {reason_of(error)}; {RESTARTS}") from error
    except SaveError as error:
        message = str(error).replace(str(part), str(folder)).replace(RESUMES, RESTARTS)
        raise SaveError(message) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _block_to_write(block: Block, opened: OpenModel, run: Run) -> Block:
    """Return a copy of a block in the stored form of the format; the block itself does not change."""
    copied = replace(block, module=twin(block.module))
    if run.format.opens_experts:
        open_experts(copied.module, stored_names(opened.model))
    adapt_block(copied, run, opened.dtype)
    layers = [layer for layer in linears(copied.module).values() if isinstance(layer, CompressedLinear)]
    for layer in layers:
        if layer.scheme.folds:
            layer.absorb_inputs(stored_sparsity(layer, run.storage, run.sparse) is not None)
    store_as_planned(block.name, copied.module, run.storage, run.sparse)
    for layer in layers:
        _cast_parts(layer, run)
    return copied


def _outside_to_write(opened: OpenModel, run: Run) -> Outside:
    """Return copies of the compressed embedding and LM head in the stored form of the format."""
    layers = {name: twin(layer) for name, layer in compressed_ends(opened.model).items()}
    for name, layer in layers.items():
        adapt(layer, run, opened.dtype, f"save: {name}")
        _cast_parts(layer, run)
    return Outside(embeddings_of(opened), layers, quantized_embeddings(opened, run))


def _cast_parts(layer: CompressedLinear, run: Run) -> None:
    """Convert the parts of a layer that is not stored dense to their stored dtypes."""
    if not layer.scheme.plain:
        layer.change_parts(lambda p: p.in_storage(run.scale_dtype if p.scheme.quantized else run.storage))


def _verify(part: Path, digests: dict[str, str], dtype: str, device: torch.device, folder: Path) -> None:
    """Raise VerificationError unless all compressed layers read back bit for bit."""
    model, _ = load(part, dtype, device)
    for name, digest in digests.items():
        if layer_of(model.get_submodule(name)).sha256() != digest:
            raise VerificationError(f"{folder}: {name} differs after reloading")
