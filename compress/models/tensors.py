"""Replace the tensors of a module."""

from __future__ import annotations

from torch import Tensor, nn


def assign(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replace parameters and buffers by tensors, without copying."""
    for name, tensor in tensors.items():
        parent_name, _, leaf = name.rpartition(".")
        parent = module.get_submodule(parent_name)
        if leaf in parent._parameters:
            parent._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            parent._buffers[leaf] = tensor
