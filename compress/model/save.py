"""Writing a checkpoint: shards block by block, each complete or not there at all, then what describes them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.errors import NumericError, SaveError
from compress.formats.base import CacheScheme, Format
from compress.model.cache import CONFIG_KEY
from compress.model.open import OpenModel
from compress.model.packed import CompressedLinear, linears
from compress.numerics.sparse import SparsePolicy, SparseWeight, Sparsity, choose, sparsities
from compress.types import dtype_name

OUTSIDE = "outside"


def shard_name(number: int, count: int) -> str:
    """The usual name of shard `number` (from 1) of `count`."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when all went well, and is removed when it did not.

    Raises SaveError, saying what is still there, when the disk is full or the folder cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise SaveError(
            f"{path}: {_reason(error)}; finished blocks are kept, the same command continues there"
        ) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _reason(error: Exception) -> str:
    text = str(error)
    full = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    if getattr(error, "errno", None) in full or any(os.strerror(number) in text for number in full):
        return "the disk is full"
    return f"cannot be written ({text})"


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_shard(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors atomically in safetensors; returns the file's sha256."""
    with atomic(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def hold_as_stored(name: str, module: nn.Module, storage: torch.dtype, policy: SparsePolicy) -> None:
    """Let every pruned linear of the block `name` hold its kept weights alone where they will be stored so.

    Raises NumericError when a weight that was pruned is no longer zero.
    """
    for child_name, layer in linears(module).items():
        if not isinstance(layer, CompressedLinear):
            continue
        sparsity = stored_sparsity(layer, storage, policy)
        try:
            if sparsity is not None:
                layer.hold_kept(sparsity)
        except NumericError as error:
            raise NumericError(f"{name}.{child_name}: {error}") from error


def stored_sparsity(layer: CompressedLinear, storage: torch.dtype, policy: SparsePolicy) -> Sparsity | None:
    """How the layer's kept weights will be stored alone; None where they will not be."""
    mask = layer.mask if policy != "off" else None
    if mask is None:
        return None
    return choose(sparsities(mask), layer.shape, storage if layer.packed is None else layer.packed.grid.bits, policy)


def block_tensors(name: str, module: nn.Module, format_: Format, storage: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a block by their full names, compressed linears as the format stores them."""
    found: dict[str, Tensor] = {}
    inside: list[str] = []
    for child_name, child in module.named_modules():
        if isinstance(child, CompressedLinear):
            full = f"{name}.{child_name}"
            inside.append(child_name + ".")
            found |= {f"{full}.{key}": t for key, t in layer_tensors(child, format_, storage).items()}
    for child_name, tensor in module.state_dict().items():
        if not any(child_name.startswith(prefix) for prefix in inside):
            found[f"{name}.{child_name}"] = _stored(tensor, storage)
    return {key: found[key].cpu().contiguous() for key in sorted(found)}


def layer_tensors(layer: CompressedLinear, format_: Format, storage: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one compressed linear by their names inside the module."""
    held = layer.held
    if isinstance(held, Tensor):
        assert layer.input_permutation is None, "an order of inputs is taken back before a layer is stored dense"
        found = {"weight": _stored(held.T if layer.transposed else held, storage)}
    else:
        if isinstance(held, SparseWeight):
            found = format_.encode_floats(replace(held, values=_stored(held.values, storage)))
        else:
            found = format_.encode(held.in_storage(storage), layer.activations)
        found |= {format_.input_names[name]: tensor for name, tensor in layer.input_tensors().items()}
    if layer.bias is not None:
        found["bias"] = _stored(layer.bias, storage)
    return found


def _stored(tensor: Tensor, storage: torch.dtype) -> Tensor:
    """Floating tensors in the storage dtype, others (codes, 8-bit floats) as they are."""
    wide = tensor.is_floating_point() and tensor.element_size() > 1
    return tensor.detach().to(storage) if wide else tensor.detach()


def outside_state(opened: OpenModel) -> dict[str, Tensor]:
    """Tensors that belong to no block, as they are; tied ones once."""
    tied = set(getattr(opened.model, "all_tied_weights_keys", None) or {})
    prefixes = tuple(block.name + "." for block in opened.blocks)
    state = sorted(opened.model.state_dict().items())
    return {name: tensor for name, tensor in state if not name.startswith(prefixes) and name not in tied}


def outside_tensors(opened: OpenModel, storage: torch.dtype) -> dict[str, Tensor]:
    """Tensors that belong to no block, as they are stored."""
    return {name: _stored(tensor, storage).cpu().contiguous() for name, tensor in outside_state(opened).items()}


def write_description(
    opened: OpenModel,
    folder: Path,
    shards: dict[str, list[str]],
    sizes: int,
    quantization: dict[str, Any] | None,
    storage: torch.dtype,
    caches: Mapping[str, CacheScheme] | None = None,
) -> None:
    """Everything beside the shards: index, config with its quantization part, generation config, tokenizer.

    caches: how keys and values are rounded, by attention, where the quantization part does not say it.
    """
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sizes}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)
    config = opened.config.to_dict()
    config.pop("_name_or_path", None)
    config["architectures"] = [type(opened.model).__name__]
    config["dtype"] = dtype_name(storage)
    if quantization is not None:
        config["quantization_config"] = quantization
    if caches:
        config[CONFIG_KEY] = {name: scheme.to_json() for name, scheme in caches.items()}
    generation = getattr(opened.model, "generation_config", None)
    try:
        if generation is not None:
            generation.save_pretrained(folder)
        if opened.tokenizer is not None:
            opened.tokenizer.save_pretrained(folder)
    except OSError as error:
        raise SaveError(f"{folder}: {_reason(error)}") from error
    write_json(folder / "config.json", config)


def dense_linear_names(opened: OpenModel, compressed: set[str]) -> list[str]:
    """Full names of all linears of the model that stay dense, the head included."""
    return [name for name in linears(opened.model) if name not in compressed]
