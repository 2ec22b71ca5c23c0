"""Distillation: the compressed model learns to give the uncompressed one's next-token distributions (Hinton 2015)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.context import Run
from compress.contract import ModelPass
from compress.numerics.divergences import DivergenceName, distillation_loss
from compress.train.loop import Where, train
from compress.train.settings import Settings
from compress.train.student import Student, trainable
from compress.train.teacher import Beside, Stored, Teacher, ask

TOP_K = 256  # of 49152 tokens in SmolLM2-135M at int4: 2% off in the gradient, where 64 are 6%; 2 KiB per token of text


class Distill(Settings, ModelPass):
    """Minimize the divergence from the uncompressed model on the calibration text, by a few steps of AdamW.

    What is compressed stays so: codes are fixed, and a factor of each scale is learned (with `train: [scales, norms]`
    this is the end-to-end stage of EfficientQAT, Chen 2024, arXiv 2407.11062, section 3.3, with a teacher in place of
    the text's own next tokens); pruned weights stay zero. Scales, weights and biases are those of the targets; norms
    are trained where their own names match the targets. The head and the embeddings are not trained.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/1503.02531"

    divergence: DivergenceName = Field(
        default="forward_kl", description="of the student from the teacher: forward_kl, reverse_kl, js, or tv"
    )
    temperature: float = Field(default=1.0, gt=0, description="both models' logits are divided by it")
    hard: float = Field(default=0.0, ge=0, le=1, description="share of the loss that is cross-entropy with the text")
    top_k: int | None = Field(
        default=TOP_K,
        ge=1,
        description="keep the teacher's likeliest tokens and the mass of the rest, computed once; null: run it in "
        "every step",
    )

    @property
    def needs_teacher(self) -> bool:
        return True

    def apply(self, model: nn.Module, run: Run) -> None:
        assert run.calibration is not None and run.open_teacher is not None
        where = Where(run.label or self.key(), run.journal, run.folder_of_pass(), str(run.storage))
        chosen = trainable(model, self.train, self.takes, run.storage, where.label)
        with self._teacher(run, where.label) as teacher, chosen as student:
            self._note(student, run, where.label)
            run.training[where.label] = train(student, _Objective(self, teacher), run.calibration, self, where)

    def _note(self, student: Student, run: Run, label: str) -> None:
        if student.kept:
            message = "scales that are not stored as floats are not trained"
            run.journal.add("fallback", label, message, layers=len(student.kept), first=student.kept[0])

    @contextmanager
    def _teacher(self, run: Run, label: str) -> Iterator[Teacher]:
        assert run.calibration is not None and run.open_teacher is not None
        if self.top_k is None:
            with run.open_teacher() as model:
                yield Beside(model, self.temperature, label)
        else:
            yield self._asked(run, label)

    def _asked(self, run: Run, label: str) -> Stored:
        def tell(done: int, of: int) -> None:
            run.journal.add("progress", label, "the uncompressed model's outputs", done=done, of=of)

        assert run.calibration is not None and run.open_teacher is not None and self.top_k is not None
        return ask(
            run.open_teacher, run.calibration, self.temperature, self.top_k, run.work, run.device, label, tell
        )  # fmt: skip


class _Objective:
    """(1 - hard) * T^2 * divergence + hard * cross-entropy, the mean over tokens."""

    def __init__(self, step: Distill, teacher: Teacher) -> None:
        self.step, self.teacher = step, teacher

    def __call__(self, model: nn.Module, ids: Tensor, rows: Sequence[int]) -> Tensor:
        step, hard = self.step, self.step.hard
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        loss = torch.zeros((), device=logits.device)
        if hard < 1:
            targets = self.teacher(ids, rows)
            soft = distillation_loss(step.divergence, logits.flatten(0, 1), targets, step.temperature)
            loss = loss + (1 - hard) * soft
        if hard > 0:
            predicted = logits[:, :-1].float().flatten(0, 1)
            loss = loss + hard * nn.functional.cross_entropy(predicted, ids[:, 1:].flatten())
        return loss
