"""FSDP: shard a student's parameters over processes for training, and unshard them afterwards.

Each process holds some rows of every parameter, of its gradient and of the optimizer's averages. A block is unsharded
for its forward and backward passes. A single weight is unsharded when a parametrization changes it after a step, so
that masks, scales and grids are computed from whole weights and equal those of an unsharded training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def split(model: nn.Module, blocks: list[nn.Module], device: torch.device, processes: int, reshard: bool) -> None:
    """Shard all parameters of a model over processes, by rows; each block is its own unit.

    reshard: free a block's unsharded parameters between its forward and its backward pass.
    """
    mesh = init_device_mesh(device.type, (processes,))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    if processes > 1:  # experts that got no token in one process
        model.set_reduce_scatter_unused_params(True)


def full(tensor: Tensor) -> Tensor:
    """Unshard a tensor, a collective operation; a plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(whole: Tensor, other: Tensor) -> Tensor:
    """Shard a whole tensor, which every process holds, in the same way as another tensor."""
    whole = whole.to(other.device)
    if not isinstance(other, DTensor):
        return whole
    return distribute_tensor(whole, other.device_mesh, other.placements, src_data_rank=None)


@torch.no_grad()
def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Unshard tensors into CPU memory, one after the other; keep: whether this process keeps them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = full(tensor.detach())
        if keep:
            found[name] = whole.cpu().contiguous()  # no copy if it is on the CPU: a copy would double the peak
    return found


@contextmanager
def full_parameters(module: nn.Module) -> Iterator[None]:
    """Unshard a module's parameters and their gradients inside the context; in-place changes are kept."""
    found = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    if not found:
        yield
        return
    for owner, name, parameter in found:
        whole = nn.Parameter(full(parameter.detach()), requires_grad=parameter.requires_grad)
        whole.grad = None if parameter.grad is None else full(parameter.grad)
        setattr(owner, name, whole)
    try:
        yield
    finally:
        for owner, name, parameter in found:
            whole = getattr(owner, name)
            parameter.detach().copy_(like(whole.detach(), parameter))
            if parameter.grad is not None:
                parameter.grad.copy_(like(whole.grad, parameter.grad))
            setattr(owner, name, parameter)
