"""Iterative pruning: alternate pruning and training, with or without rewinding (Renda 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear
from compress.passes.contract.context import Run
from compress.passes.families.training import SparseTrainingPass
from compress.train.loop import Objective, ScheduleSlice, train
from compress.train.options import TrainingOptions
from compress.train.parametrization import Parametrization, Shrinking
from compress.train.student import Student


class IterativePruning(SparseTrainingPass):
    """Prune and retrain in rounds; every round removes the same fraction of the smallest remaining weights.

    `retrain` is the training of a round (Renda 2020, section 2):

    - finetune: the remaining weights at a low constant rate.
    - lr_rewind: the remaining weights with the learning rates of the schedule from `rewind_to` on.
    - weight_rewind: as lr_rewind, after the weights are reset to their values at the fraction `rewind_to` of a first
      training without pruning. This is the lottery ticket of Frankle & Carbin (2019); rewind_to: 0 resets to the
      original weights.

    All other trained parameters are treated in the same way. steps or epochs count the whole schedule; a round runs its
    part after `rewind_to`. With an N:M pattern, rounds increase the number of groups of M that keep only N weights.
    """

    use_for: ClassVar[str] = (
        "Finding sparse networks (lottery tickets), and the least loss at a given sparsity when training time does "
        "not matter."
    )
    not_for: ClassVar[str] = "Short runs: sparsegpt prunes in one sweep."
    paper: ClassVar[str] = "https://arxiv.org/abs/2003.02389"

    rounds: int = Field(default=3, ge=1, description="number of rounds of pruning and training")
    retrain: Literal["finetune", "weight_rewind", "lr_rewind"] = Field(
        default="lr_rewind", description="weights and learning rates of the training in a round"
    )
    rewind_to: float = Field(
        default=0.1, ge=0, lt=1, description="fraction of the steps to which weights or learning rates are rewound"
    )
    final_rate: float = Field(default=0.1, gt=0, le=1, description="rate of finetune, relative to learning_rate")

    def without_effect(self) -> dict[str, str]:
        idle = {"final_rate": f"with retrain: {self.retrain}; leave it out, or use retrain: finetune"}
        return super().without_effect() | (idle if self.retrain != "finetune" else {})

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        return _RoundMask(self, layer)

    def sparsity_of(self, rounds_done: int) -> float:
        """Return the sparsity after a round: 1 - (1 - s)^(round / rounds), exactly s after the last round."""
        return (
            self.target_sparsity
            if rounds_done == self.rounds
            else 1 - (1 - self.target_sparsity) ** (rounds_done / self.rounds)
        )

    def apply(self, model: nn.Module, run: Run) -> None:
        with self.objective(run) as objective, self.student(model, run) as student:
            rewound: dict[str, Tensor] = {}
            if self.retrain == "weight_rewind":
                rewound = self._train(student, objective, run, "before", self, ScheduleSlice(keep=self.rewind_to))
            for rounds_done in range(1, self.rounds + 1):
                prune(student, rounds_done)
                rewind(student, rewound)
                settings, span = self._retraining(), ScheduleSlice(begin=self.rewind_to)
                self._train(student, objective, run, f"round {rounds_done}", settings, span)

    def _retraining(self) -> TrainingOptions:
        if self.retrain != "finetune":
            return self
        rate = self.learning_rate * self.final_rate
        return self.model_copy(update={"schedule": "constant", "warmup": 0, "learning_rate": rate})

    def _train(
        self,
        student: Student,
        objective: Objective,
        run: Run,
        part: str,
        settings: TrainingOptions,
        span: ScheduleSlice,
    ) -> dict[str, Tensor]:
        """Run one training with its own checkpoint folder and report record; return the parameters that `span` kept."""
        context, folder = self.where(run), run.folder_of_pass()
        label, work = f"{context.label}, {part}", None if folder is None else folder / part.replace(" ", "-")
        context = replace(context, label=label, work=work)
        run.training[label] = train(student, objective, self.text(run), settings, context, span)
        return span.saved_parameters


class _RoundMask(Shrinking):
    """A mask that shrinks between trainings.

    Attributes:
        step: the pass with the sparsity of this layer.
    """

    def __init__(self, step: IterativePruning, layer: CompressedLinear) -> None:
        super().__init__(layer)
        self.step = step


@torch.no_grad()
def prune(student: Student, rounds_done: int) -> None:
    """Shrink all masks to the sparsities after a round; weights outside of them become zero."""
    for layer in student.layers.values():
        if isinstance(layer.parametrization, _RoundMask):
            step = layer.parametrization.step
            layer.parametrization.shrink(layer.weight, step.pattern, step.sparsity_of(rounds_done))
            layer.weight.mul_(layer.parametrization.mask)


@torch.no_grad()
def rewind(student: Student, rewound: dict[str, Tensor]) -> None:
    """Reset the trained parameters to the kept values; weights outside of the current masks stay zero."""
    for name, tensor in rewound.items():
        student.named()[name].copy_(tensor)
    for layer in student.layers.values():
        if isinstance(layer.parametrization, Shrinking):
            layer.weight.mul_(layer.parametrization.mask)
