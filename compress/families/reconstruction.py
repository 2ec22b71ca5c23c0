"""Targets and errors for passes that reconstruct the output of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.api.layers import BlockInputs
from compress.api.processes import Processes

ErrorName = Literal["symmetric", "asymmetric"]
"""The target of a block's output. 'symmetric': the original block's output for the same inputs. 'asymmetric': the
uncompressed model's activations after the block, so that the block also corrects errors of the blocks before it."""

Targets = Callable[[int], Tensor]
"""The target output of the block for a batch, by its number."""


def relative_square(
    found: Float[Tensor, "*any"], wanted: Float[Tensor, "*any"], energy: Tensor | None = None
) -> Tensor:
    """||found - wanted||^2 / ||wanted||^2 in float32. energy: to divide by instead of ||wanted||^2."""
    wanted = wanted.float()
    energy = wanted.square().sum() if energy is None else energy
    return (found.float() - wanted).square().sum() / energy.clamp(min=1e-30)


def block_energies(inputs: BlockInputs, targets: Targets) -> Sequence[Tensor | None]:
    """For each batch ||target||^2 over all processes, divided by their number; None in one process.

    The mean over processes of `relative_square` with it is that of the whole batch.
    """
    processes = inputs.processes
    if processes.size == 1:
        return [None] * inputs.batches
    own = torch.stack([targets(batch).float().square().sum() for batch in range(inputs.batches)])
    return list(processes.sum(own) / processes.size)


def block_error(block: nn.Module, inputs: BlockInputs, targets: Targets, batches: Iterable[int]) -> float:
    """||block(X) - target||^2 / ||target||^2 over the given batches, by their numbers."""
    error = energy = 0.0
    for batch in batches:
        wanted = targets(batch).float()
        error += float((inputs.forward(block, batch).float() - wanted).square().sum())
        energy += float(wanted.square().sum())
    error, energy = inputs.processes.totals(error, energy)
    return error / max(energy, 1e-30)


def shares(sizes: Sequence[int], processes: Processes) -> list[float]:
    """The fraction of each batch that this process has. sizes: its number of sequences of each batch."""
    return [own / sum(parts) for own, *parts in zip(sizes, *processes.gather(sizes), strict=True)]


@torch.no_grad()
def add_gradients(parameters: Sequence[Tensor], processes: Processes) -> None:
    """Replace gradients by their sums over all processes; one that no process has stays None."""
    if processes.size == 1:
        return
    known = [any(flags) for flags in zip(*processes.gather([p.grad is not None for p in parameters]), strict=True)]
    for parameter in (parameter for parameter, some in zip(parameters, known, strict=True) if some):
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = processes.sum(own)
