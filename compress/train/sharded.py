"""FSDP: a student whose parameters are split over processes while it is trained, and whole again afterwards.

Each process keeps some rows of every parameter, of its gradient and of the optimizer's averages. A block is put
together where it is run, forward and backward, and a weight where a parametrization changes it after a step, one at a
time: masks, scales and grids are made of whole weights, and are those of an unsplit training.
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
    """Split all parameters of a model over processes, rows by rows; each block is put together by itself.

    reshard: let go of a block between its forward and its backward pass.
    """
    mesh = init_device_mesh(device.type, (processes,))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_unused_params(True)  # experts that no token of one process reached


def full(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all processes, which must all ask for it; one that is not split as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(whole: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, known to every process, split as another one is."""
    whole = whole.to(other.device)
    if not isinstance(other, DTensor):
        return whole
    return distribute_tensor(whole, other.device_mesh, other.placements, src_data_rank=None)


@torch.no_grad()
def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors in the memory of the CPU, one after the other; keep: whether this process wants them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = full(tensor.detach())
        if keep:
            found[name] = whole.cpu().contiguous()  # no copy where it is there: it would double the peak
    return found


@contextmanager
def put_together(module: nn.Module) -> Iterator[None]:
    """Parameters of a module whole inside of the context, with their gradients; changes in place are kept."""
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
