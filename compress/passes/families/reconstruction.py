"""Passes that reconstruct the output of a block: targets, errors, and training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.passes.contract.facts import Log
from compress.passes.contract.journal import Journal, JournalEntry
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.passes import BlockPass, works_on
from compress.passes.contract.processes import Processes
from compress.train.loop import TrainingContext, part_weights, train
from compress.train.options import Share, TrainingOptions
from compress.train.parametrization import Parametrize, masked
from compress.train.student import UNTRAINED_SCALES, trainable

ErrorName = Literal["symmetric", "asymmetric"]
"""The target of a block's output. 'symmetric': the original block's output for the same inputs. 'asymmetric': the
uncompressed model's activations after the block, so that the block also corrects errors of the blocks before it."""

Targets = Callable[[int], Tensor]
"""The target output of the block for a batch, by its number."""


def relative_square(
    output: Float[Tensor, "*any"], target: Float[Tensor, "*any"], energy: Tensor | None = None
) -> Tensor:
    """||found - wanted||^2 / ||wanted||^2 in float32.

    Args:
        energy: to divide by instead of ||wanted||^2.
    """
    target = target.float()
    energy = target.square().sum() if energy is None else energy
    return (output.float() - target).square().sum() / energy.clamp(min=1e-30)


def block_energies(inputs: BlockInputs, targets: Targets) -> Sequence[Tensor | None]:
    """For each batch ||target||^2 over all processes, divided by their number; None in one process.

    The mean over processes of `relative_square` with it is that of the whole batch.
    """
    processes = inputs.processes
    if processes.size == 1:
        return [None] * inputs.batches
    local_energies = torch.stack([targets(batch).float().square().sum() for batch in range(inputs.batches)])
    return list(processes.sum(local_energies) / processes.size)


def block_error(block: nn.Module, inputs: BlockInputs, targets: Targets, batches: Iterable[int]) -> float:
    """||block(X) - target||^2 / ||target||^2 over the given batches, by their numbers."""
    error = energy = 0.0
    for batch in batches:
        target = targets(batch).float()
        error += float((inputs.forward(block, batch).float() - target).square().sum())
        energy += float(target.square().sum())
    error, energy = inputs.processes.totals(error, energy)
    return error / max(energy, 1e-30)


def shares(sizes: Sequence[int], processes: Processes) -> list[float]:
    """Return the fraction of each batch that this process has.

    Args:
        sizes: its number of sequences of each batch.
    """
    return [local_size / sum(parts) for local_size, *parts in zip(sizes, *processes.gather(sizes), strict=True)]


@torch.no_grad()
def add_gradients(parameters: Sequence[Tensor], processes: Processes) -> None:
    """Replace gradients by their sums over all processes; one that no process has stays None."""
    if processes.size == 1:
        return
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters])
    local_gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters
    ]
    owners, *gradients = processes.sums([has_gradient.int(), *local_gradients])
    for parameter, owner_count, gradient in zip(parameters, owners.tolist(), gradients, strict=True):
        parameter.grad = gradient if owner_count else None


@dataclass(frozen=True, eq=False)
class BlockLoss:
    """The relative squared error of a block's output, the mean over all tokens of some calibration batches.

    Attributes:
        inputs: the calibration batches.
        targets: outputs that the block should give.
        energies: of `block_energies`.
        sizes: elements of the target of each batch.
    """

    inputs: BlockInputs
    targets: Targets
    energies: Sequence[Tensor | None]
    sizes: Sequence[int]

    def counts(self, examples: Tensor, rows: list[int]) -> tuple[int, ...]:
        """Return the elements of the targets of some batches, by their numbers."""
        return (sum(self.sizes[batch] for batch in rows),)

    def __call__(
        self, model: nn.Module, examples: Tensor, rows: list[int], weights: Sequence[float] = (1.0,)
    ) -> Tensor:
        """Compute the loss of some batches, by their numbers."""
        shares = part_weights([self.counts(examples, [batch]) for batch in rows], [1] * len(rows))
        losses = [
            share * relative_square(self.inputs.forward(model, batch), self.targets(batch), self.energies[batch])
            for batch, (share,) in zip(rows, shares, strict=True)
        ]
        return weights[0] * torch.stack(losses).mean()


class ReconstructionPass(TrainingOptions, BlockPass):
    """A pass that trains a block to give the output that it should."""

    batch: int = Field(default=1, ge=1, description="calibration batches in one forward and backward pass")
    hold_out: Share = Field(
        default=0.1, description="fraction of the batches to hold out of the training; the best state on them is kept"
    )

    def judged(self, batches: int) -> list[int]:
        """Return the numbers of the batches that decide: the held-out ones, or all."""
        trained, held_out = self.split(batches)
        return held_out or trained

    def learn(
        self, block: nn.Module, inputs: BlockInputs, targets: Targets, log: Log, parametrize: Parametrize = masked
    ) -> tuple[int, list[str]]:
        """Train the block in place; returns the number of steps, and the names of trained norms and biases.

        Args:
            parametrize: how the weights of dense linears are trained.
        """

        def show(entry: JournalEntry) -> None:
            if entry.kind == "progress":
                log(entry.kind, entry.message, **entry.figures)

        sizes = [targets(batch).numel() for batch in range(inputs.batches)]
        objective = BlockLoss(inputs, targets, block_energies(inputs, targets), sizes)

        def takes(name: str) -> bool:
            return works_on(self, f"{inputs.name}.{name}")

        context = TrainingContext(inputs.label, Journal(listeners=[show]), inputs.work, str(inputs.storage))
        chosen = trainable(block, self.train, takes, inputs.storage, inputs.label, parametrize, is_whole_model=False)
        with chosen as student:
            if student.untrained_layers:
                log(
                    "fallback",
                    UNTRAINED_SCALES,
                    layers=len(student.untrained_layers),
                    first=student.untrained_layers[0],
                )
            numbers = torch.arange(inputs.batches)
            steps: int = train(student, objective, numbers, self, context, parts=True)["steps"]
            norms_and_biases = [*student.parameters["norms"], *student.parameters["biases"]]
        return steps, norms_and_biases
