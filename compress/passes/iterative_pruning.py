"""Iterative pruning: prune a little, train again, and so on, with what is trained rewound or not (Renda 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.api.context import Run
from compress.families.training import SparseTrainingPass
from compress.model.linear import CompressedLinear
from compress.train.loop import Objective, ScheduleSlice, train
from compress.train.options import TrainingOptions
from compress.train.parametrization import Parametrization, Shrinking
from compress.train.student import Student


class IterativePruning(SparseTrainingPass):
    """Rounds of pruning and training: every round removes the same share of the smallest weights that are left.

    What a round trains (Renda 2020, section 2): `finetune`: what is left, at a low constant rate; `lr_rewind`: what is
    left, with the rates from `rewind_to` on once more; `weight_rewind`: what is left, put back to what it was after
    `rewind_to` of the steps of a first training without pruning, with the rates from there on. This last one is the
    lottery ticket of Frankle & Carbin (2019), at rewind_to: 0 from the very weights that the model came with. All other
    trained parameters go the same way. steps or epochs are those of the whole schedule, of which a round takes the part
    behind `rewind_to`. With an N:M pattern rounds differ in how many groups of M keep N only.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2003.02389"

    rounds: int = Field(default=3, ge=1, description="how often it is pruned and trained")
    retrain: Literal["finetune", "weight_rewind", "lr_rewind"] = Field(
        default="lr_rewind", description="what a round trains, and with which rates"
    )
    rewind_to: float = Field(
        default=0.1, ge=0, lt=1, description="share of the steps to which weights or rates are put back"
    )
    final_rate: float = Field(default=0.1, gt=0, le=1, description="the rate of finetune, as a share of learning_rate")

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        return Shrinking(layer)

    def sparsity_of(self, done: int) -> float:
        """After a round: 1 - (1 - s)^(round / rounds), the whole sparsity after the last."""
        return self.target_sparsity if done == self.rounds else 1 - (1 - self.target_sparsity) ** (done / self.rounds)

    def apply(self, model: nn.Module, run: Run) -> None:
        with self.objective(run) as objective, self.student(model, run) as student:
            kept: dict[str, Tensor] = {}
            if self.retrain == "weight_rewind":
                kept = self._train(student, objective, run, "before", self, ScheduleSlice(keep=self.rewind_to))
            for done in range(1, self.rounds + 1):
                sparsity = self.sparsity_of(done)
                prune(student, self, sparsity)
                rewind(student, kept)
                settings, span = self._retraining(), ScheduleSlice(begin=self.rewind_to)
                self._train(student, objective, run, f"round {done}", settings, span)

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
        """One training, with a state and a place in the report of its own; what was kept of it."""
        where, folder = self.where(run), run.folder_of_pass()
        label, work = f"{where.label}, {part}", None if folder is None else folder / part.replace(" ", "-")
        where = replace(where, label=label, work=work)
        assert run.calibration is not None
        run.training[label] = train(student, objective, run.calibration, settings, where, span)
        return span.kept


@torch.no_grad()
def prune(student: Student, step: IterativePruning, sparsity: float) -> None:
    """Shrink all masks; weights outside of them become zero."""
    for layer in student.layers.values():
        if isinstance(layer.parametrization, Shrinking) and layer.weight is not None:
            layer.parametrization.shrink(layer.weight, step.pattern, sparsity)
            layer.weight.mul_(layer.parametrization.mask)


@torch.no_grad()
def rewind(student: Student, kept: dict[str, Tensor]) -> None:
    """Put what is trained back to what was kept, zero outside of the masks of now."""
    for name, tensor in kept.items():
        student.named()[name].copy_(tensor)
    for layer in student.layers.values():
        if isinstance(layer.parametrization, Shrinking) and layer.weight is not None:
            layer.weight.mul_(layer.parametrization.mask)
