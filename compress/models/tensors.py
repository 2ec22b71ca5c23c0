"""The tensors of a module: replace them, and check that they are finite."""

from __future__ import annotations

import torch
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


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity.

    Unlike `isfinite`, this allocates no tensor of its size.
    """
    return tensor.numel() == 0 or bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())
