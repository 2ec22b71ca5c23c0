"""The tensors of a checkpoint: layers, blocks and the tensors outside of blocks in their stored form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.checkpoint.checkpoint import MASKED_KEY
from compress.checkpoint.formats.base import Format
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.sources.stored import stored_in
from compress.errors import NumericError, SaveError, TargetError
from compress.layers.embedding import CompressedEmbedding
from compress.layers.linear import CompressedLinear, linears
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.models.computation import kept_dtype
from compress.models.experts import CUBES, Experts
from compress.models.paged import Paging
from compress.models.structure.ends import compressed_ends, end_layer, find_ends
from compress.numerics.sparse.positions import SparseLayout, SparsePolicy, sparsities

STACKED = re.compile(r"(.*\.\d+\..*\.)\d+\.[^.]+")
"""The name of a linear of one expert: the experts of a block, with a dot at the end, their number and the linear."""


def masks_as_zeros(model: PreTrainedModel) -> frozenset[str]:
    """Return the linears of a model whose zeros are their mask: pruned in memory, or by the checkpoint it is from.

    A linear whose tensors store its mask is not among them.
    """
    layers = compressed_layers(model)
    recorded = getattr(model.config, MASKED_KEY, None) or ()
    loaded = (name for name in recorded if name not in layers or layers[name].positions is None)
    return frozenset([*loaded, *(name for name, layer in layers.items() if layer.mask_words is not None)])


def store_as_planned(
    name: str, module: nn.Module, storage: torch.dtype, policy: SparsePolicy, within: Path | None = None
) -> None:
    """Convert the pruned linears of the block `name` to packed sparse weights, if the policy says so.

    Args:
        within: folder of the files that hold converted weights; None: they are in memory.

    Raises NumericError if a pruned weight is no longer zero.
    """
    paging = Paging(within)
    for child_name, layer in linears(module).items():
        if not isinstance(layer, CompressedLinear):
            continue
        sparsity = stored_sparsity(layer, storage, policy)
        try:
            if sparsity is not None:
                layer.store_kept(sparsity)
                paging.add(layer)
        except NumericError as error:
            raise NumericError(f"{name}.{child_name}: {error}") from error
    paging.finish()


def stored_sparsity(layer: CompressedLinear, storage: torch.dtype, policy: SparsePolicy) -> SparseLayout | None:
    """How the layer's kept weights will be stored alone; None if they are stored otherwise, or are alone already."""
    mask = layer.mask if policy != "off" else None
    return None if mask is None else layer.scheme.stored_sparsity(sparsities(mask), storage, policy)


def block_tensors(name: str, module: nn.Module, format_: Format, storage: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a block by full name, with compressed linears in the stored form of the format."""
    inside: list[str] = []
    for child_name, child in module.named_modules():
        if isinstance(child, CompressedLinear):
            inside.append(child_name + ".")
            for key, tensor in layer_tensors(child, format_, storage).items():
                yield f"{name}.{child_name}.{key}", tensor.cpu().contiguous()
    starts = tuple(inside)
    for child_name, tensor in module.state_dict().items():
        if not child_name.startswith(starts):
            dtype = kept_dtype(module, child_name, storage)
            stored = in_storage(tensor, format_.stored_dtype(tensor.shape, dtype))
            yield f"{name}.{child_name}", stored.cpu().contiguous()


def layer_tensors(layer: CompressedLinear, format_: Format, storage: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors of one compressed linear by their names inside the module.

    Args:
        format_: format that encodes quantized parts and transforms.
        storage: dtype of dense tensors, and of scales unless the format fixes theirs; None keeps every dtype.
    """
    scheme = layer.scheme
    if format_.adapt(scheme) is None or scheme.plain:
        assert scheme.maps_inputs is None, "transforms of inputs are folded before a layer is stored dense"
        weight = layer.weight
        tensors = {"weight": in_storage(weight.T if layer.transposed else weight, storage)}
    else:
        parts = layer.all_parts
        if storage is not None:
            scales = format_.scales_in(storage)
            parts = [part.in_storage(scales if part.scheme.quantized else storage) for part in parts]
        tensors = format_.encode(scheme, parts, layer.all_transforms)
    if layer.bias is not None:
        bias_dtype = None if storage is None else format_.stored_dtype(layer.bias.shape, storage)
        tensors["bias"] = in_storage(layer.bias, bias_dtype)
    return tensors


def in_storage(tensor: Tensor, storage: torch.dtype | None) -> Tensor:
    """Cast float tensors to the storage dtype; others (codes, 8-bit floats) are unchanged. None keeps the dtype."""
    wide = tensor.is_floating_point() and tensor.element_size() > 1 and storage is not None
    return tensor.detach().to(storage) if wide else tensor.detach()


def model_tensors(model: nn.Module, format_: Format) -> dict[str, Tensor]:
    """Return all tensors of a model in memory as a format stores them, in their present dtypes.

    Compressed layers have the names of the format, or of the dense model if they are stored dense. Tied tensors are
    returned under each of their names.

    Raises:
        SaveError: for experts that have no names in transformers.
    """
    experts = [name for name, module in model.named_modules() if isinstance(module, Experts) and not module.named]
    if experts:
        raise SaveError(f"save_pretrained: {experts[0]} holds its experts one by one; use compress.save(model, folder)")
    layers = compressed_layers(model)
    dense_names = {end.name: end.embedding or end.name for end in find_ends(model)}  # of tied weights
    prefixes = tuple(f"{name}." for name in layers)
    tensors = {n: t.detach() for n, t in model.state_dict().items() if not prefixes or not n.startswith(prefixes)}
    for name, layer in layers.items():
        for key, tensor in layer_tensors(layer, format_, None).items():
            plain_weight = layer.scheme.plain and key == "weight"
            tensors[f"{dense_names.get(name, name) if plain_weight else name}.{key}"] = tensor
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def compressed_layers(model: nn.Module) -> dict[str, CompressedLinear]:
    """Return the compressed linears of a model by name, with its compressed embedding and LM head."""
    layers = {name: layer for name, layer in linears(model).items() if isinstance(layer, CompressedLinear)}
    return layers | compressed_ends(model)


def outside_state(opened: OpenModel) -> dict[str, Tensor]:
    """Return tensors outside of all blocks, as in the model; tied ones once, without weights of compressed layers."""
    tied = set(getattr(opened.model, "all_tied_weights_keys", None) or {})
    ends = tuple(f"{name}." for name in compressed_ends(opened.model))
    prefixes = tuple(block.name + "." for block in opened.blocks)
    state = sorted(opened.model.state_dict().items())
    untied = {name: tensor for name, tensor in state if not name.startswith(prefixes) and name not in tied}
    return {
        n: t for n, t in untied.items() if not n.startswith(ends or ("\0",)) or n.removesuffix(".bias") + "." in ends
    }


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
    """Return tensors outside of all blocks, in their stored form.

    Args:
        opened: the model.
        layers: compressed layers among embedding and LM head, by name.
        format_: the format.
        storage: dtype of dense tensors.
        rounded: codes of other tensors that the format rounds.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in outside_state(opened).items():
        part = (rounded or {}).get(name)
        if part is None:
            dtype = kept_dtype(opened.model, name, storage)
            tensors[name] = in_storage(tensor, format_.stored_dtype(tensor.shape, dtype))
        else:
            encoded = format_.encode(LayerScheme(part.shape, (part.scheme,)), [part], [])
            tensors |= {f"{name.removesuffix('weight')}{key}": value for key, value in encoded.items()}
    for end in (end for end in find_ends(opened.model) if end.name in layers):
        layer = layers[end.name]
        plain = format_.adapt(layer.scheme) is None or layer.scheme.plain
        is_embedding = (plain or format_.embeddings) and end.embedding is not None  # as in the dense model
        name = str(end.embedding) if is_embedding else end.name
        stored = layer_tensors(layer, format_, storage)
        tensors |= {f"{name}.{key}": tensor for key, tensor in stored.items() if key != "bias"}
    result = {name: tensors[name].cpu().contiguous() for name in sorted(tensors)}
    addresses: set[int] = set()
    for name, tensor in result.items():  # a layer that the caller has put in may share its tensor with the embedding
        if tensor.data_ptr() in addresses:
            result[name] = tensor.clone()
        addresses.add(tensor.data_ptr())
    return result


def dense_modules(opened: OpenModel, compressed: set[str], shards: Iterable[Path]) -> list[str]:
    """Return the full names of all modules that readers may build as linears, and whose weights are stored dense.

    These are the linears of the model, and the modules of all other stored matrices that are no embeddings: servers
    build routers as linears, too. A name that ends with a dot means all modules below it: of experts whose weights are
    one tensor, and of experts that are all dense, because servers build one module for them and ask for its name.

    Args:
        compressed: names of compressed layers.
        shards: files with all stored tensors.
    """
    model, shapes = opened.model, {n: p.header.shape for path in shards for n, p in stored_in(path).items()}
    packed = compressed | {name for end in find_ends(model) if end.name in compressed for name in end.names}
    tables = {n for n, module in model.named_modules() if isinstance(module, nn.Embedding | CompressedEmbedding)}
    return dense_names(linears(model), shapes, packed | tables)


def dense_names(linear_names: Iterable[str], shapes: Mapping[str, Sequence[int]], excluded: Set[str]) -> list[str]:
    """Return the names of all modules that readers may build as linears, from the shapes of stored tensors.

    Args:
        linear_names: names of linears, also of those whose weight is not stored.
        shapes: shape of every stored tensor by name.
        excluded: compressed layers and embeddings.
    """
    names = list(linear_names)
    names += [n.removesuffix(".weight") for n, shape in shapes.items() if n.endswith(".weight") and len(shape) == 2]
    cubes = [n for n, shape in shapes.items() if len(shape) == 3 and not n.endswith(".weight")]
    owners = Counter(name.rpartition(".")[0] for name in cubes if min(shapes[name]) > 1)
    names += [f"{owner}." for owner, count in owners.items() if count == CUBES]
    dense = [name for name in dict.fromkeys(names) if name not in excluded]
    stacks = {name: matched[1] if (matched := STACKED.fullmatch(name)) else None for name in dense}
    occupied = {stack for stack in set(stacks.values()) if stack and any(name.startswith(stack) for name in excluded)}
    whole = {name: stack for name, stack in stacks.items() if stack and stack not in occupied}
    return list(dict.fromkeys(whole.get(name, name) for name in dense))


def named_as_stored(
    schemes: Mapping[str, LayerScheme], opened: OpenModel, format_: Format
) -> Mapping[str, LayerScheme]:
    """Return schemes by the names of layers in the files: tied weights of some formats have that of the embedding."""
    if not format_.embeddings:
        return schemes
    names = {end.name: end.embedding for end in find_ends(opened.model)}
    return {names.get(name) or name: scheme for name, scheme in schemes.items()}


def check_together(format_: Format, schemes: Mapping[str, LayerScheme]) -> None:
    """Check that layers, each of which the format stores, can be in one checkpoint.

    Args:
        schemes: schemes of linears by full name, as passes leave them.

    Raises:
        TargetError: if two layers cannot be in one checkpoint.
    """
    adapted = {name: format_.adapt(scheme) for name, scheme in schemes.items() if scheme.quantized}
    reason = format_.clash({name: scheme for name, scheme in adapted.items() if scheme is not None})
    if reason is not None:
        raise TargetError(f"save: {reason}")
