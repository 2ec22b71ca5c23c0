"""FSDP: shard a student's parameters over processes for training, and unshard them afterwards.

Each process holds some rows of every parameter, of its gradient and of the optimizer's averages. A block is unsharded
for its forward and backward passes. A single weight is unsharded when a parametrization changes it after a step, so
that masks, scales and grids are computed from unsharded weights and equal those of an unsharded training.
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
    """Shard all parameters of a model over processes by rows; each block is a separate unit.

    Args:
        model: the model.
        blocks: blocks of the model.
        device: device of the parameters.
        processes: number of processes.
        reshard: whether a block's unsharded parameters are freed between its forward and its backward pass.
    """
    mesh = init_device_mesh(device.type, (processes,))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    if processes > 1:  # experts without tokens in one process
        model.set_reduce_scatter_unused_params(True)


def full(tensor: Tensor) -> Tensor:
    """Unshard a tensor, which is a collective operation; a plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """Shard a tensor, which every process holds, in the same way as an example."""
    tensor = tensor.to(example.device)
    if not isinstance(example, DTensor):
        return tensor
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)


@torch.no_grad()
def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Unshard tensors into CPU memory, one after the other.

    Args:
        tensors: tensors by name.
        keep: whether this process returns the tensors; the others return an empty dictionary.
    """
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        unsharded = full(tensor.detach())
        if keep:
            gathered[name] = unsharded.cpu().contiguous()  # no copy if it is on the CPU: a copy would double the peak
    return gathered


@contextmanager
def full_parameters(module: nn.Module) -> Iterator[None]:
    """Unshard the parameters of a module and their gradients inside the context; in-place changes are preserved."""
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    if not sharded:
        yield
        return
    for owner, name, parameter in sharded:
        unsharded = nn.Parameter(full(parameter.detach()), requires_grad=parameter.requires_grad)
        unsharded.grad = None if parameter.grad is None else full(parameter.grad)
        setattr(owner, name, unsharded)
    try:
        yield
    finally:
        for owner, name, parameter in sharded:
            unsharded = getattr(owner, name)
            parameter.detach().copy_(shard_like(unsharded.detach(), parameter))
            if parameter.grad is not None:
                parameter.grad.copy_(shard_like(unsharded.grad, parameter.grad))
            setattr(owner, name, parameter)
