"""Count the bytes of tensors of a checkpoint that no pass compresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compress.blockwise.quantized_embeddings import embeddings_of
from compress.checkpoint.formats.base import Format
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.save import outside_dense
from compress.layers.linear import linears
from compress.layers.scheme import LayerScheme
from compress.models.computation import kept_dtype
from compress.models.structure.blocks import Block
from compress.models.structure.ends import End


def rest_of(block: Block) -> dict[str, Tensor]:
    """Return the tensors of a block except the weights of its linears, by full name."""
    inside = tuple(f"{name}." for name in linears(block.module))
    state = block.module.state_dict().items()
    other_tensors = {n: t for n, t in state if not n.startswith(inside) or n.removesuffix(".bias") + "." in inside}
    return {f"{block.name}.{name}": tensor for name, tensor in other_tensors.items()}


def rest_bytes(opened: OpenModel, storage: torch.dtype, ends: Sequence[End] = (), format_: Format | None = None) -> int:
    """Return bytes of all stored tensors except the weights of linears in the blocks and of these ends.

    format_: that of the checkpoint; None: all in `storage`.
    """
    apart = {f"{name}.weight" for end in ends for name in end.names}
    tensors = {name: tensor for name, tensor in outside_dense(opened).items() if name not in apart}
    for block in opened.blocks:
        tensors |= rest_of(block)
    if format_ is None:
        return sum(tensor_bytes(tensor, kept_dtype(opened.model, name, storage)) for name, tensor in tensors.items())
    places, total = embeddings_of(opened), 0
    for name, tensor in tensors.items():
        part = format_.end_layout(places, name, tensor.shape)
        if part is None:
            dtype = kept_dtype(opened.model, name, storage)
            total += tensor_bytes(tensor, format_.stored_dtype(tensor.shape, dtype))
        else:
            total += format_.size_bytes(LayerScheme((tensor.shape[0], tensor.shape[1]), (part,)), storage)
    return total


def dense_weight_bytes(shapes: Mapping[str, tuple[int, int]], storage: torch.dtype) -> int:
    """Bytes of the dense weights of linears."""
    return sum(rows * width for rows, width in shapes.values()) * storage.itemsize


def tensor_bytes(tensor: Tensor, storage: torch.dtype) -> int:
    """Return the bytes of a tensor whose floats are stored in a dtype."""
    return tensor.numel() * (storage.itemsize if tensor.is_floating_point() else tensor.element_size())
