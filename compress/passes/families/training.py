"""Training passes: the options of the loss, the teacher, the student, and the run of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.blockwise.survey import survey_model
from compress.data.training_text import TrainingText
from compress.errors import RecipeError
from compress.layers.linear import CompressedLinear, linears
from compress.layers.scheme import LayerScheme
from compress.models.kinds.batch import Examples
from compress.models.kinds.contract import ModelKind
from compress.models.kinds.headless import check_learns
from compress.models.kinds.masked import MASKED_SHARE
from compress.models.structure.blocks import find_blocks
from compress.numerics.metrics import DivergenceName
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Effects, Requirements
from compress.passes.contract.observers import Nothing, Observer
from compress.passes.contract.options import ModelSource
from compress.passes.contract.passes import ModelPass, works_on
from compress.passes.families.allocation import Uniform
from compress.passes.families.pruning import Pruning
from compress.train.loop import TrainingContext, train
from compress.train.objective import LanguageLoss
from compress.train.options import TrainingOptions
from compress.train.parametrization import Kind, Parametrization, masked
from compress.train.student import UNTRAINED_SCALES, Student, trainable
from compress.train.teacher import CachedTeacher, OnlineTeacher, Teacher, TeacherOptions, cached_teacher

TEACHERS = ("teacher", "divergence", "temperature", "top_k")
"""The options of a teacher."""
TOP_K = 256  # of 49152 tokens in SmolLM2-135M at int4: 2% gradient error (64: 6%); 2 KiB per token of text

STORED_OUTPUTS = (
    "training with steps reads new sequences of the stream, but top_k stores the outputs of the teacher for a fixed "
    "set; write top_k: null, or epochs instead of steps to train on the sequences of the calibration"
)
"""Why a training with stored outputs of a teacher cannot read a stream."""


class TrainingPass(TrainingOptions, ModelPass):
    """A pass that trains the whole model.

    The loss is the cross-entropy on the calibration text; with ce_weight < 1 it includes the divergence from a teacher,
    by default the uncompressed model. For a masked language model, tokens are masked for both the model and the teacher
    (`MaskedLM`), the same tokens in every epoch; the cross-entropy is that of the masked tokens.
    """

    ce_weight: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="weight of the cross-entropy on the text in the loss; the divergence from the teacher "
        "has the weight 1 - ce_weight",
    )
    divergence: DivergenceName = Field(
        default="forward_kl",
        description="divergence of the student from the teacher: forward_kl, reverse_kl, js, or tv",
    )
    teacher: ModelSource | None = Field(
        default=None,
        description="hub id, folder or .gguf file of a teacher with the same tokenizer; null: the uncompressed model",
    )
    temperature: float = Field(default=1.0, gt=0, description="softmax temperature of model and teacher")
    token_scale: float | None = Field(
        default=None,
        gt=0,
        description="weight exp(c / token_scale) of a token in the divergence, with c the teacher's cross-entropy "
        "(TSLD); null: equal weights",
    )
    hidden: float = Field(
        default=0.0, ge=0, description="weight of the relative squared difference of hidden states; needs top_k: null"
    )
    cosine: float = Field(
        default=0.0, ge=0, description="weight of 1 - cosine of the last hidden states; needs top_k: null"
    )
    layer_map: tuple[tuple[int, int], ...] | None = Field(
        default=None,
        description="for hidden: pairs (block of the model, block of the teacher), from 0: [[0, 1], [1, 3]]; null: "
        "evenly spaced",
    )
    top_k: int | None = Field(
        default=TOP_K,
        ge=1,
        description="store the teacher's top_k most likely tokens and the probability of the rest, computed once; "
        "null: run the teacher in every step",
    )

    mask_probability: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description=f"fraction of the tokens to mask for a masked language model; default {MASKED_SHARE:g}",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (self.hidden or self.cosine) and self.top_k is not None:
            raise ValueError("hidden states need the teacher in every step; add top_k: null")
        if self.token_scale is not None and self.ce_weight == 1:
            raise ValueError("token_scale weighs the divergence, which has weight 0 with ce_weight: 1; lower ce_weight")

    def without_effect(self) -> dict[str, str]:
        idle = super().without_effect()
        if not self.hidden:
            idle["layer_map"] = "with hidden: 0; set hidden, or leave layer_map out"
        if self.ce_weight == 1:
            remedy = "with ce_weight: 1, where no output of a teacher is learned; write ce_weight: 0.5, or leave it out"
            names = ("divergence", "temperature") if self.hidden or self.cosine else TEACHERS
            idle |= dict.fromkeys(names, remedy)
        return idle

    @property
    def requires(self) -> Requirements:
        learns = self.ce_weight < 1 or self.hidden > 0 or self.cosine > 0
        return Requirements(
            data=True,
            teacher=learns and (self.teacher or True),
            paired_states=self.hidden > 0 or self.cosine > 0,
            layer_map=self.layer_map,
            objective=True,
            training=True,
            new_sequences=(self.steps or 0) * self.batch * self.accumulate,
            fixed_text=STORED_OUTPUTS if learns and self.top_k is not None else None,
            trains=self.kinds or (),
        )

    @property
    def kinds(self) -> tuple[Kind, ...] | None:
        """The kinds of parameters to train; None: all kinds."""
        return self.train

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        """The parametrization of a dense linear, by its full name; by default the weight, zero outside of its mask."""
        return masked(name, layer)

    def apply(self, model: nn.Module, run: Run) -> None:
        context = self.where(run)
        with self.objective(run) as objective, self.student(model, run) as student:
            run.training[context.label] = train(student, objective, self.text(run), self, context)

    def text(self, run: Run) -> Examples | TrainingText:
        """Return what the pass trains on: with `steps` the streams of the calibration, else its sequences.

        Raises:
            RecipeError: for stored outputs of a teacher, which are those of a fixed set of sequences.
        """
        assert run.calibration is not None
        if run.stream is None or self.steps is None:
            return run.calibration
        if self.requires.fixed_text is not None:
            raise RecipeError(f"{run.label or self.key()}: {self.requires.fixed_text}")
        return run.stream

    def where(self, run: Run) -> TrainingContext:
        """Return the context of the training loop."""
        key = f"{run.storage} {self._lm_objective(run)}"
        return TrainingContext(run.label or self.key(), run.journal, run.folder_of_pass(), key)

    def adapt_objective(self, lm_objective: ModelKind, label: str) -> ModelKind:
        remedy = "write ce_weight: 0, so that it learns a teacher's outputs, or use distill"
        if self.ce_weight > 0:
            check_learns(lm_objective, label, remedy)
        if self.token_scale is not None:
            check_learns(lm_objective, label, "leave token_scale out, which weighs tokens by their loss")
        if lm_objective.texts > 1 and (self.hidden or self.cosine):
            raise RecipeError(
                f"{label}: hidden and cosine compare the hidden states of one stack of blocks, and an encoder-decoder "
                "model has two; leave them out"
            )
        if self.mask_probability is not None and not lm_objective.masks:
            raise RecipeError(
                f"{label}: mask_probability has no effect on a model of {lm_objective.predicts}; leave it out"
            )
        return lm_objective.with_masks(self.seed, self.mask_probability)

    def _lm_objective(self, run: Run) -> ModelKind:
        return self.adapt_objective(run.lm_objective, run.label or self.key())

    def parametrization_of_layers(
        self, model: nn.Module, run: Run
    ) -> Callable[[str, CompressedLinear], Parametrization]:
        """Return the function that parametrizes a layer, by its full name."""
        return self.parametrize

    @contextmanager
    def student(self, model: nn.Module, run: Run) -> Iterator[Student]:
        """Prepare the model for training and restore it at the end. Raises TargetError."""
        label, parametrize = run.label or self.key(), self.parametrization_of_layers(model, run)
        with trainable(model, self.kinds, partial(works_on, self), run.storage, label, parametrize) as student:
            self.note_untrained(student, run, label)
            yield student

    def note_untrained(self, student: Student, run: Run, label: str) -> None:
        """Journal the layers of which a part is not trained though the options ask for it."""
        if student.untrained_layers:
            run.journal.add(
                "fallback",
                label,
                UNTRAINED_SCALES,
                layers=len(student.untrained_layers),
                first=student.untrained_layers[0],
            )

    @contextmanager
    def objective(self, run: Run) -> Iterator[LanguageLoss]:
        """Return the loss; a teacher that runs in every step is open inside of the context."""
        with self._teacher(run) as teacher:
            yield LanguageLoss(
                self.ce_weight,
                self.divergence,
                self.temperature,
                teacher,
                self.token_scale,
                self.hidden,
                self.cosine,
                self.layer_map,
                self._lm_objective(run),
            )

    @contextmanager
    def _teacher(self, run: Run) -> Iterator[Teacher | None]:
        if not self.requires.teacher:
            yield None
        elif self.top_k is None:
            assert run.open_teacher is not None
            with run.open_teacher(self.teacher) as model:
                yield OnlineTeacher(model, self.temperature, run.label or self.key(), self._lm_objective(run))
        else:
            yield self._cached_teacher(run, self.top_k)

    def _cached_teacher(self, run: Run, top_k: int) -> CachedTeacher:
        label = run.label or self.key()

        def report_progress(sequences_done: int, of: int) -> None:
            run.journal.add("progress", label, "outputs of the teacher", done=sequences_done, of=of)

        assert run.open_teacher is not None
        opened, examples = partial(run.open_teacher, self.teacher), self.text(run)
        assert isinstance(examples, Examples)
        options = TeacherOptions(self.temperature, top_k, self.teacher, self._lm_objective(run))
        return cached_teacher(opened, examples, options, run.work, run.device, label, report_progress)


class SparseTrainingPass(Pruning, TrainingPass):
    """A pass that prunes weights during training, by their magnitudes."""

    observes: ClassVar[type[Observer]] = Nothing

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.train is not None and "weights" not in self.train:
            raise ValueError(f"{self.key()} must train weights; add weights to train, or leave train out")

    def effects(self, layer: LayerScheme) -> Effects:
        return replace(super().effects(layer), uneven=not isinstance(self.allocate, Uniform))

    def score(self, weight: Float[Tensor, "out in"], statistics: Any) -> Float[Tensor, "out in"]:
        return weight.abs()

    def parametrization_of_layers(
        self, model: nn.Module, run: Run
    ) -> Callable[[str, CompressedLinear], Parametrization]:
        """As of all training passes; an allocation, found before the training, gives each layer its own sparsity."""
        sparsity_of = self.allocated(model, run)
        if not sparsity_of:
            return self.parametrize

        def parametrize(name: str, layer: CompressedLinear) -> Parametrization:
            own_step = self.model_copy(update={"sparsity": sparsity_of[name], "allocate": Uniform()})
            return own_step.parametrize(name, layer)

        return parametrize

    def allocated(self, model: nn.Module, run: Run) -> Mapping[str, float]:
        """Return the sparsity of each layer, by full name; empty if all have that of the pass."""
        survey = self.allocate.survey(self)
        if survey is None:
            return {}
        assert isinstance(model, PreTrainedModel)
        label, blocks = run.label or self.key(), find_blocks(model)
        names = [f"{block.name}.{name}" for block in blocks for name in linears(block.module)]
        sparsity_of = survey_model(model, survey, [name for name in names if works_on(self, name)], run, label)
        figures = {"least": round(min(sparsity_of.values()), 4), "most": round(max(sparsity_of.values()), 4)}
        run.journal.add("note", label, f"sparsities of the layers by {self.allocate.key}", **figures)
        return sparsity_of
