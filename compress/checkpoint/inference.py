"""What `load` does so that kernels compute as much as possible of a packed model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import ModelError
from compress.kernels.cpu.codes import input_group, takes_integers
from compress.layers.embedding import CompressedEmbedding, layer_of
from compress.layers.linear import LINEARS, CompressedLinear, linears, replace_linear
from compress.layers.shared_input import SharedInput
from compress.layers.transforms.rounding import InputRounding
from compress.models.computation import reads_weight
from compress.models.structure.ends import find_ends, replace_end
from compress.native.library import available, library
from compress.native.pages import PAGES
from compress.numerics.quant.grids import GRIDS

ACTIVATIONS = ("int8",)
"""The grids that `load` can round inputs to."""
LARGE = 4 << 20
"""The size in bytes from which a weight is copied to large pages."""


def keeps_narrow(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether dense bfloat16 weights stay as they are in a model that is computed in `dtype`."""
    return dtype is torch.float32 and device.type == "cpu" and available()


def narrow_weights(model: PreTrainedModel, present: Collection[str]) -> list[str]:
    """The names of the dense weights of linears and of the ends of a model, among those present."""
    names = [f"{name}.weight" for name, module in linears(model).items() if isinstance(module, LINEARS)]
    for end in find_ends(model):
        names += [f"{name}.weight" for name in end.names if not any(reads_weight(model, part) for part in end.names)]
    read_directly = {f"{name}.weight" for name in linears(model) if reads_weight(model, name)}
    return [name for name in dict.fromkeys(names) if name in present and name not in read_directly]


def put_narrow(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Replace linears and ends whose weights are bfloat16 by layers that hold these weights, without a copy."""
    ends = find_ends(model)
    inside = {name: end for end in ends for name in end.names}
    for full, tensor in tensors.items():
        name = full.removesuffix(".weight")
        end = inside.get(name)
        layer = replace_linear(model, name) if end is None else replace_end(model, end)
        layer.put(_in_large_pages(tensor.T if layer.transposed else tensor))


def _in_large_pages(tensor: Tensor) -> Tensor:
    """A copy of a large mapped tensor that is read a quarter faster; the mapped one leaves memory."""
    native = library()
    if native is None or tensor.nbytes < LARGE:
        return tensor
    copy = PAGES.empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)
    native.compress_release(tensor.data_ptr(), tensor.nbytes)
    return copy


def allow_narrow_inputs(model: PreTrainedModel) -> None:
    """Let kernels round float32 inputs to bfloat16, as the model itself does in the dtype of its checkpoint."""
    for module in model.modules():
        if isinstance(module, CompressedLinear | CompressedEmbedding):
            for part in layer_of(module).all_parts:
                part.narrow_inputs = True


def round_activations(model: PreTrainedModel, name: str) -> None:
    """Round the inputs of layers of integer codes whose checkpoint does not say so, in groups where a kernel can.

    Raises ModelError for other values than those of `ACTIVATIONS`, and for a model without such layers.
    """
    if name not in ACTIVATIONS:
        raise ModelError(f"activations: {name!r} is not known; use {', '.join(ACTIVATIONS)}")
    layers = [m for m in model.modules() if isinstance(m, CompressedLinear) and takes_integers(m.scheme)]
    if not layers:
        raise ModelError("activations: the model has no layers of integer codes; leave activations out")
    for layer in layers:
        if layer.rounding is None:
            group = None if layer.scheme.codes is None else input_group(layer.all_parts[0])
            layer.round_inputs(InputRounding.of(GRIDS[name], group=group))


def packed_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the quantized weights of linears; kernels make a copy of about this size."""
    return sum(tensor.nbytes for layer in _packed(model) for tensor in layer.tensors().values())


def _packed(model: PreTrainedModel) -> list[CompressedLinear]:
    """Return the quantized linears of a model."""
    return [layer for layer in linears(model).values() if isinstance(layer, CompressedLinear) and layer.quantized]


@contextmanager
def copies_within(model: PreTrainedModel, limit_bytes: int) -> Iterator[None]:
    """Keep the copies that kernels make of packed weights only if all of them stay within a limit.

    Otherwise the copy of a layer is dropped after each of its forward passes, and made again for the next one. Layers
    of a module that share an input (`share_inputs`) have theirs at once. The results are the same.
    """

    def forget(layer: nn.Module, *_: Any) -> None:
        assert isinstance(layer, CompressedLinear)
        for part in layer.all_parts:
            part.forget_prepared()

    with ExitStack() as stack:
        if packed_bytes(model) > limit_bytes:
            for layer in _packed(model):
                forget(layer)
                stack.callback(layer.register_forward_hook(forget).remove)
        yield


def share_inputs(model: nn.Module) -> None:
    """Let the layers of each module be computed together where they share an input."""
    for module in model.modules():
        layers = [child for child in module.children() if isinstance(child, CompressedLinear)]
        shared = SharedInput() if len(layers) > 1 else None
        for layer in layers:
            layer.shared_input = shared
