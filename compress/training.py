"""What passes that train have in common: what is learned from, and the course of a training, under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field
from torch import nn

from compress.context import Run
from compress.contract import ModelPass
from compress.model.packed import CompressedLinear
from compress.numerics.divergences import DivergenceName
from compress.pruning import Pruning
from compress.train.loop import Where, train
from compress.train.objective import LanguageLoss
from compress.train.parametrization import Kind, Masked, Parametrization
from compress.train.settings import Settings
from compress.train.student import Student, trainable
from compress.train.teacher import Beside, Stored, Teacher, ask

# Measured on SmolLM2-135M in int4, 1024 tokens of WikiText-2, against all 49152 tokens. Relative error of the gradient:
# 16: 14%, 64: 6.1%, 256: 2.2% (cosine 0.9999), 1024: 0.7%; KL seen: 52%, 69%, 83%, 93%. 2 KiB per token of text.
TOP_K = 256


class TrainingPass(Settings, ModelPass):
    """Options that every pass has that trains the whole model, and how it goes about it.

    The loss is the cross-entropy with the calibration text, or with hard < 1 also the divergence from a teacher: the
    uncompressed model.
    """

    hard: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of the loss that is cross-entropy with the text; the rest is the divergence from the "
        "uncompressed model",
    )
    divergence: DivergenceName = Field(
        default="forward_kl", description="of the student from the teacher: forward_kl, reverse_kl, js, or tv"
    )
    temperature: float = Field(default=1.0, gt=0, description="both models' logits are divided by it")
    top_k: int | None = Field(
        default=TOP_K,
        ge=1,
        description="keep the teacher's likeliest tokens and the mass of the rest, computed once; null: run it in "
        "every step",
    )

    @property
    def needs_teacher(self) -> bool:
        return self.hard < 1

    @property
    def kinds(self) -> tuple[Kind, ...] | None:
        """What is trained; None: all that there is."""
        return self.train

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        """How the weight of a dense linear is trained, by its full name; as it is, zero outside of its mask."""
        return Masked(layer.mask)

    def apply(self, model: nn.Module, run: Run) -> None:
        assert run.calibration is not None
        where = self.where(run)
        with self.objective(run) as objective, self.student(model, run) as student:
            run.training[where.label] = train(student, objective, run.calibration, self, where)

    def where(self, run: Run) -> Where:
        """What the loop is told of the run."""
        return Where(run.label or self.key(), run.journal, run.folder_of_pass(), str(run.storage))

    @contextmanager
    def student(self, model: nn.Module, run: Run) -> Iterator[Student]:
        """The model made ready for training, and put back in the end. Raises TargetError."""
        label = run.label or self.key()
        with trainable(model, self.kinds, self.takes, run.storage, label, self.parametrize) as student:
            if student.kept:
                message = "scales that are not stored as floats are not trained"
                run.journal.add("fallback", label, message, layers=len(student.kept), first=student.kept[0])
            yield student

    @contextmanager
    def objective(self, run: Run) -> Iterator[LanguageLoss]:
        """What is made small; a teacher that is asked in every step is open meanwhile."""
        with self._teacher(run) as teacher:
            yield LanguageLoss(self.hard, self.divergence, self.temperature, teacher)

    @contextmanager
    def _teacher(self, run: Run) -> Iterator[Teacher | None]:
        if not self.needs_teacher:
            yield None
        elif self.top_k is None:
            assert run.open_teacher is not None
            with run.open_teacher() as model:
                yield Beside(model, self.temperature, run.label or self.key())
        else:
            yield self._asked(run, self.top_k)

    def _asked(self, run: Run, top_k: int) -> Stored:
        label = run.label or self.key()

        def tell(done: int, of: int) -> None:
            run.journal.add("progress", label, "the uncompressed model's outputs", done=done, of=of)

        assert run.calibration is not None and run.open_teacher is not None
        return ask(run.open_teacher, run.calibration, self.temperature, top_k, run.work, run.device, label, tell)


class SparseTrainingPass(Pruning, TrainingPass):
    """Options of passes that choose what is removed while the rest is trained."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.train is not None and "weights" not in self.train:
            raise ValueError(f"{self.key()} trains the weights that it prunes; add weights to train, or leave it out")
