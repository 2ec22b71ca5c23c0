"""Write a checkpoint: atomic shards block by block, then index, config and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.checkpoint.containers.digests import write_digests
from compress.checkpoint.containers.files import RESUMES, reason_of, write_json
from compress.checkpoint.formats.base import Format
from compress.checkpoint.saving import MASKED_KEY
from compress.checkpoint.sources.opening import OpenModel
from compress.checkpoint.sources.stored import INDEX
from compress.errors import NumericError, SaveError
from compress.layers.linear import CompressedLinear, linears
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.models.caches.quantized import CONFIG_KEY, attentions_with_cache
from compress.models.caches.scheme import CacheScheme
from compress.models.structure.ends import compressed_ends, end_layer, find_ends
from compress.numerics.dtypes import dtype_name
from compress.numerics.sparse.positions import SparseLayout, SparsePolicy, sparsities

OUTSIDE = "outside"


def store_as_planned(name: str, module: nn.Module, storage: torch.dtype, policy: SparsePolicy) -> None:
    """Convert the pruned linears of the block `name` to store kept weights alone, if the policy says so.

    Raises NumericError if a pruned weight is no longer zero.
    """
    for child_name, layer in linears(module).items():
        if not isinstance(layer, CompressedLinear):
            continue
        sparsity = stored_sparsity(layer, storage, policy)
        try:
            if sparsity is not None:
                layer.store_kept(sparsity)
        except NumericError as error:
            raise NumericError(f"{name}.{child_name}: {error}") from error


def stored_sparsity(layer: CompressedLinear, storage: torch.dtype, policy: SparsePolicy) -> SparseLayout | None:
    """How the layer's kept weights will be stored alone; None if they are stored otherwise, or are alone already."""
    mask = layer.mask if policy != "off" else None
    return None if mask is None else layer.scheme.stored_sparsity(sparsities(mask), storage, policy)


def block_tensors(name: str, module: nn.Module, format_: Format, storage: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a block by full name, with compressed linears in the stored form of the format."""
    found: dict[str, Tensor] = {}
    inside: list[str] = []
    for child_name, child in module.named_modules():
        if isinstance(child, CompressedLinear):
            full = f"{name}.{child_name}"
            inside.append(child_name + ".")
            found |= {f"{full}.{key}": t for key, t in layer_tensors(child, format_, storage).items()}
    starts = tuple(inside)
    for child_name, tensor in module.state_dict().items():
        if not child_name.startswith(starts):
            found[f"{name}.{child_name}"] = in_storage(tensor, format_.stored_dtype(tensor.shape, storage))
    return {key: found[key].cpu().contiguous() for key in sorted(found)}


def layer_tensors(layer: CompressedLinear, format_: Format, storage: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one compressed linear by their names inside the module."""
    scheme = layer.scheme
    if format_.adapt(scheme) is None or scheme.plain:
        assert scheme.maps_inputs is None, "transforms of inputs are folded before a layer is stored dense"
        weight = layer.weight
        found = {"weight": in_storage(weight.T if layer.transposed else weight, storage)}
    else:
        scales = format_.scales_in(storage)
        parts = [part.in_storage(scales if part.scheme.quantized else storage) for part in layer.all_parts]
        found = format_.encode(scheme, parts, layer.all_transforms)
    if layer.bias is not None:
        found["bias"] = in_storage(layer.bias, format_.stored_dtype(layer.bias.shape, storage))
    return found


def in_storage(tensor: Tensor, storage: torch.dtype) -> Tensor:
    """Cast float tensors to the storage dtype; others (codes, 8-bit floats) are unchanged."""
    wide = tensor.is_floating_point() and tensor.element_size() > 1
    return tensor.detach().to(storage) if wide else tensor.detach()


def outside_state(opened: OpenModel) -> dict[str, Tensor]:
    """Tensors outside of all blocks, as in the model; tied tensors once, and without weights of compressed layers."""
    tied = set(getattr(opened.model, "all_tied_weights_keys", None) or {})
    ends = tuple(f"{name}." for name in compressed_ends(opened.model))
    prefixes = tuple(block.name + "." for block in opened.blocks)
    state = sorted(opened.model.state_dict().items())
    kept = {name: tensor for name, tensor in state if not name.startswith(prefixes) and name not in tied}
    return {n: t for n, t in kept.items() if not n.startswith(ends or ("\0",)) or n.removesuffix(".bias") + "." in ends}


def outside_dense(opened: OpenModel) -> dict[str, Tensor]:
    """`outside_state`, with the weights of mapped ends as tensors without values in the dtype of computation."""
    shapes = {name: end_layer(opened.model, end).shape for name, end in opened.mapped_ends.items()}
    return outside_state(opened) | {n: torch.empty(s, dtype=opened.dtype, device="meta") for n, s in shapes.items()}


def outside_tensors(
    opened: OpenModel,
    layers: Mapping[str, CompressedLinear],
    format_: Format,
    storage: torch.dtype,
    rounded: Mapping[str, CodesPart] | None = None,
) -> dict[str, Tensor]:
    """Tensors outside of all blocks, in their stored form.

    layers: the compressed layers among the ends, by name. rounded: the codes of other tensors that the format rounds.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in outside_state(opened).items():
        part = (rounded or {}).get(name)
        if part is None:
            found[name] = in_storage(tensor, format_.stored_dtype(tensor.shape, storage))
        else:
            encoded = format_.encode(LayerScheme(part.shape, (part.scheme,)), [part], [])
            found |= {f"{name.removesuffix('weight')}{key}": each for key, each in encoded.items()}
    for end in (end for end in find_ends(opened.model) if end.name in layers):
        layer = layers[end.name]
        plain = format_.adapt(layer.scheme) is None or layer.scheme.plain
        name = end.embedding if plain and end.embedding is not None else end.name  # where the dense model has it
        stored = layer_tensors(layer, format_, storage)
        found |= {f"{name}.{key}": tensor for key, tensor in stored.items() if key != "bias"}
    result = {name: found[name].cpu().contiguous() for name in sorted(found)}
    seen: set[int] = set()
    for name, tensor in result.items():  # a layer that the caller has put in may share its tensor with the embedding
        if tensor.data_ptr() in seen:
            result[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return result


def write_description(
    opened: OpenModel,
    folder: Path,
    shards: dict[str, list[str]],
    sizes: int,
    quantization: dict[str, Any] | None,
    dtype: torch.dtype,
    caches: Mapping[str, CacheScheme] | None = None,
    masked: Sequence[str] = (),
    digests: Mapping[str, str] | None = None,
) -> None:
    """Write all files other than shards: index, config with quantization_config, generation config, tokenizer, digests.

    shards: names of the tensors by file; empty: one file of another kind holds them. sizes: bytes of all tensors.
    dtype: of computation when the checkpoint is loaded. caches: the scheme of each attention with a rounded cache, if
    quantization_config does not state it. masked: pruned linears whose masks no tensor stores. digests: sha256 of the
    shards by file, as far as known.
    """
    if shards:
        weight_map = {name: shard for shard, names in shards.items() for name in names}
        index = {"metadata": {"total_size": sizes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
    config = opened.config.to_dict()
    config.pop("_name_or_path", None)
    config["architectures"] = [type(opened.model).__name__]
    config["dtype"] = dtype_name(dtype)
    if quantization is not None:
        config["quantization_config"] = quantization
    if caches:
        config[CONFIG_KEY] = {name: scheme.to_json() for name, scheme in caches.items()}
    if masked:
        config[MASKED_KEY] = list(masked)
    written = _write_others(opened, folder)
    write_json(folder / "config.json", config)
    weights = [*shards, INDEX] if shards else [path.name for path in folder.glob("*.gguf")]
    write_digests(folder, [*weights, "config.json", *written], digests)


def _write_others(opened: OpenModel, folder: Path) -> list[str]:
    """Write generation config, tokenizer and processor; returns the names of the files, without those in folders.

    Raises SaveError.
    """
    generation = getattr(opened.model, "generation_config", None)
    written: list[str] = [name for name in opened.processor if "/" not in name]
    try:
        if generation is not None:
            generation.save_pretrained(folder)
            written.append("generation_config.json")
        if opened.tokenizer is not None:
            saved = [Path(path) for path in opened.tokenizer.save_pretrained(folder)]
            written += [path.name for path in saved if path.is_file() and path.parent == folder]
        for name, text in opened.processor.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SaveError(f"{error.filename or folder}: {reason_of(error)}; {RESUMES}") from error
    return written


def dense_linear_names(opened: OpenModel, compressed: set[str]) -> list[str]:
    """Full names of all dense linears of the model, with the head. compressed: the names of compressed layers."""
    packed = compressed | {name for end in find_ends(opened.model) if end.name in compressed for name in end.names}
    return [name for name in linears(opened.model) if name not in packed]


def stated_scheme(model: PreTrainedModel, caches: Mapping[str, CacheScheme], format_: Format) -> CacheScheme | None:
    """The common scheme of all caches of a model, if there is one and the format states it, else None."""
    kinds = set(caches.values())
    if len(kinds) != 1 or set(caches) != set(attentions_with_cache(model)):
        return None
    scheme = kinds.pop()
    return scheme if format_.states(scheme, model.config) else None
