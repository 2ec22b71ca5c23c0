"""What passes that train have in common: what is learned from, and the course of a training, under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import Field
from torch import nn

from compress.api.context import Run
from compress.api.facts import Requirements
from compress.api.passes import ModelPass
from compress.errors import RecipeError
from compress.families.pruning import Pruning
from compress.model.linear import CompressedLinear
from compress.model.objective import MASKED_SHARE, LMObjective, MaskedTokens
from compress.numerics.metrics import DivergenceName
from compress.train.loop import TrainingContext, train
from compress.train.objective import LanguageLoss
from compress.train.options import TrainingOptions
from compress.train.parametrization import Kind, Parametrization, masked
from compress.train.student import KEPT, Student, trainable
from compress.train.teacher import CachedTeacher, OnlineTeacher, Question, Teacher, ask

TOP_K = 256  # of 49152 tokens in SmolLM2-135M at int4: 2% off in the gradient, where 64 are 6%; 2 KiB per token of text


class TrainingPass(TrainingOptions, ModelPass):
    """Options that every pass has that trains the whole model, and how it goes about it.

    The loss is the cross-entropy with the calibration text; with ce_weight < 1 the divergence from a teacher, the
    uncompressed model, is added. For a masked language model, tokens of the text are masked for the model and for its
    teacher (`MaskedTokens`), the same ones in every epoch, and the cross-entropy is that of the masked tokens.
    """

    ce_weight: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of the loss that is cross-entropy with the text; the rest is the divergence from the "
        "uncompressed model",
    )
    divergence: DivergenceName = Field(
        default="forward_kl", description="of the student from the teacher: forward_kl, reverse_kl, js, or tv"
    )
    teacher: str | None = Field(
        default=None,
        description="hub id, folder or .gguf file of another model with the same tokenizer to learn from; null: the "
        "uncompressed model",
    )
    temperature: float = Field(default=1.0, gt=0, description="both models' logits are divided by it")
    token_scale: float | None = Field(
        default=None,
        gt=0,
        description="tokens with the teacher's cross-entropy c count exp(c / token_scale) in the divergence (TSLD); "
        "null: all alike",
    )
    hidden: float = Field(
        default=0.0, ge=0, description="weight of the relative squared difference of hidden states; needs top_k: null"
    )
    cosine: float = Field(
        default=0.0, ge=0, description="weight of 1 - cosine of the last hidden states ; needs top_k: null"
    )
    layer_map: tuple[tuple[int, int], ...] | None = Field(
        default=None,
        description="for hidden: pairs of a block of the model and one of the teacher, from 0: [[0, 1], [1, 3]]; null: "
        "evenly",
    )
    top_k: int | None = Field(
        default=TOP_K,
        ge=1,
        description="keep the teacher's likeliest tokens and the mass of the rest, computed once; null: run it in "
        "every step",
    )

    mask_probability: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description=f"share of the tokens that a model of masked tokens is asked for; {MASKED_SHARE:g} if not given",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (self.hidden or self.cosine) and self.top_k is not None:
            raise ValueError("hidden states are compared in every step, in which the teacher runs; add top_k: null")
        if self.token_scale is not None and self.ce_weight == 1:
            raise ValueError("token_scale weighs the divergence, which ce_weight: 1 leaves out; lower ce_weight")
        if self.layer_map is not None and not self.hidden:
            raise ValueError("layer_map says which hidden states are compared; give hidden a weight, or leave it out")

    @property
    def requires(self) -> Requirements:
        learns = self.ce_weight < 1 or self.hidden > 0 or self.cosine > 0
        return Requirements(data=True, teacher=learns and (self.teacher or True), objective=True, training=True)

    @property
    def kinds(self) -> tuple[Kind, ...] | None:
        """What is trained; None: all that there is."""
        return self.train

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        """How the weight of a dense linear is trained, by its full name; as it is, zero outside of its mask."""
        return masked(name, layer)

    def apply(self, model: nn.Module, run: Run) -> None:
        assert run.calibration is not None
        where = self.where(run)
        with self.objective(run) as objective, self.student(model, run) as student:
            run.training[where.label] = train(student, objective, run.calibration, self, where)

    def where(self, run: Run) -> TrainingContext:
        """What the loop is told of the run."""
        key = f"{run.storage} {self._asks(run)}"
        return TrainingContext(run.label or self.key(), run.journal, run.folder_of_pass(), key)

    def asks(self, lm_objective: LMObjective, where: str) -> LMObjective:
        if isinstance(lm_objective, MaskedTokens):
            return replace(lm_objective, seed=self.seed, probability=self.mask_probability or MASKED_SHARE)
        if self.mask_probability is not None:
            raise RecipeError(f"{where}: mask_probability says nothing of a model of {lm_objective.of}; leave it out")
        return lm_objective

    def _asks(self, run: Run) -> LMObjective:
        return self.asks(run.lm_objective, run.label or self.key())

    @contextmanager
    def student(self, model: nn.Module, run: Run) -> Iterator[Student]:
        """The model made ready for training, and put back in the end. Raises TargetError."""
        label = run.label or self.key()
        with trainable(model, self.kinds, self.takes, run.storage, label, self.parametrize) as student:
            if student.kept:
                run.journal.add("fallback", label, KEPT, layers=len(student.kept), first=student.kept[0])
            yield student

    @contextmanager
    def objective(self, run: Run) -> Iterator[LanguageLoss]:
        """What is made small; a teacher that is asked in every step is open meanwhile."""
        with self._teacher(run) as teacher:
            yield LanguageLoss(
                self.ce_weight, self.divergence, self.temperature, teacher, self.token_scale, self.hidden, self.cosine,
                self.layer_map, self._asks(run),
            )  # fmt: skip

    @contextmanager
    def _teacher(self, run: Run) -> Iterator[Teacher | None]:
        if not self.requires.teacher:
            yield None
        elif self.top_k is None:
            assert run.open_teacher is not None
            with run.open_teacher(self.teacher) as model:
                yield OnlineTeacher(model, self.temperature, run.label or self.key(), self._asks(run))
        else:
            yield self._asked(run, self.top_k)

    def _asked(self, run: Run, top_k: int) -> CachedTeacher:
        label = run.label or self.key()

        def tell(done: int, of: int) -> None:
            run.journal.add("progress", label, "the uncompressed model's outputs", done=done, of=of)

        assert run.calibration is not None and run.open_teacher is not None
        opened = partial(run.open_teacher, self.teacher)
        question = Question(self.temperature, top_k, self.teacher, self._asks(run))
        return ask(opened, run.calibration, question, run.work, run.device, label, tell)


class SparseTrainingPass(Pruning, TrainingPass):
    """Options of passes that choose what is removed while the rest is trained."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.train is not None and "weights" not in self.train:
            raise ValueError(f"{self.key()} trains the weights that it prunes; add weights to train, or leave it out")
