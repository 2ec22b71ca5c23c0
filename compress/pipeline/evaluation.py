"""Evaluate one model, or several on the same windows and items against the first one: `compress eval` calls this."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.blockwise.capture import ModelShell
from compress.checkpoint.containers.files import check_writable
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.sources.supported import check_supported
from compress.checkpoint.sources.vocabulary import first_difference
from compress.data.overlap import CalibrationRuns
from compress.data.text_source import as_source
from compress.errors import ModelError, RecipeError, one_line, reported_as
from compress.evaluation import EVALUATORS, combine_all, measure_one
from compress.evaluation.base import EvaluationContext
from compress.evaluation.harness.tasks import check_tasks
from compress.evaluation.store import Store, digest_of
from compress.evaluation.windows import evaluation_examples
from compress.models.computation import device_of
from compress.models.kinds.batch import Examples
from compress.models.kinds.contract import ModelKind
from compress.models.kinds.kinds import described, features_of, is_headless, kind_of, objective_of
from compress.passes.contract.context import Run
from compress.passes.contract.journal import Journal
from compress.passes.contract.memory import available_bytes, copies_limit
from compress.passes.contract.processes import Processes
from compress.pipeline.defaults import with_fitting_windows
from compress.pipeline.models import EvaluatedModel, Model, evaluated_models, models_in
from compress.pipeline.progress import shown_progress
from compress.pipeline.texts import EVALUATED, suited
from compress.pipeline.texts import texts_of as requested_texts
from compress.recipe.evaluation import Evaluate
from compress.report.write import ReportError, reproduction_of
from compress.results.comparison import Comparison
from compress.results.measurements.base import overlap_in_words
from compress.results.result import ModelResult, Reproduction
from compress.version import __version__

WORK = Path("out") / "evaluation"
"""The default folder of stored results."""


@dataclass(frozen=True)
class CommonInputs:
    """What all models of an evaluation must share with the one that is loaded first.

    Attributes:
        texts: Windows of the evaluation texts by name.
        tokenizer: Tokenizer of the first model.
        kind: ModelKind of the first model.
        features: Features that the first model reads besides token ids.
    """

    texts: dict[str, Examples]
    tokenizer: PreTrainedTokenizerBase | None
    kind: ModelKind | None
    features: object | None


def evaluate(
    models: Model | Sequence[Model],
    settings: Evaluate | None = None,
    *,
    base: Model | None = None,
    work: Path | None = WORK,
    dtype: str = "auto",
    device: str = "auto",
    journal: Journal | None = None,
    progress: bool = False,
    on_failure: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Measure models one after the other, and compare all but the base with it.

    With several processes of a launcher, each measures a share of the requests, and all return the result.

    Args:
        models: Checkpoint folders, hub ids, .gguf files, or models in memory as pairs (model, tokenizer), which
            `compress.load` returns; one or several.
        settings: What is measured; by default the perplexity on the embedded text.
        base: Model that the others are compared with; by default the first of several.
        work: Folder of stored results, with which a killed evaluation continues; None stores nothing, and measures no
            divergence.
        dtype: Dtype of computation of models that are loaded; one in memory has its own.
        device: Device of computation of these models.
        journal: Receives notes.
        on_failure: Receives what was measured before an error, which is then raised; the error is among the failures
            of the model that was being measured.
        progress: Whether to show a progress bar.

    Raises:
        OutputError: for a folder of stored results that cannot be written.
        ModelError: for a folder without a model, and for different tokenizers.
        CalibrationError: for texts that cannot be read.
        RecipeError: for no model, for limits without a base, and for tasks that do not exist.
        NumericError: for a loss that is NaN.
    """
    sources = models_in(models)
    settings = settings or Evaluate()
    if settings.fail_if is not None and base is None and len(sources) == 1:
        raise RecipeError("eval: fail_if limits what a model loses against a base; name a base, or another model")
    check_tasks(settings)
    if work is not None:
        check_writable(work)
    journal, compute_device = journal or Journal(), device_of(device)
    processes = Processes.launched(cpu=compute_device.type == "cpu")
    measured_models = evaluated_models(sources, sources[0] if base is None and len(sources) > 1 else base)
    base_name = measured_models[0].name if base is not None or len(sources) > 1 else None
    runs = {source.name: recorded_run(source, journal) for source in measured_models}
    if base_name is None:
        settings = settings.model_copy(update={"top_k": None})  # there is nothing to diverge from
    results, common = MeasuredModels(base_name, settings, journal), None
    pooling = measured_models[0].pooling
    console = Console(file=sys.stderr, markup=False, force_jupyter=False)  # also while lm-eval's own bars are hidden
    showing = shown_progress(journal, console) if progress and processes.first else nullcontext()
    with showing, results.reported_on_failure(on_failure):
        for source in measured_models:
            journal.add("progress", "evaluate", f"opening {source.name}")
            digest = digest_of(source.answers_digest, dtype, __version__)
            store = Store(work, digest, results.models[0].digest if results.models else digest, processes)
            with source.opened(dtype, compute_device) as (model, tokenizer):
                check_model(model, tokenizer, source.name)
                if common is None:
                    results.settings = settings = _suited(settings, model, journal)
                    texts = texts_of(model, tokenizer, settings, tuple(runs.values()), journal)
                    common = CommonInputs(texts, tokenizer, kind_of(model), features_of(model))
                    if base_name is None and is_headless(model):
                        raise headless_error(model, source.name)
                else:
                    check_same(model, tokenizer, source.name, common, measured_models[0].name)
                overlaps = recorded_overlaps(runs[source.name], source.name, common.texts, journal)
                context = EvaluationContext(
                    Run(model.device, model.dtype, journal=journal),
                    texts=common.texts,
                    tokenizer=tokenizer,
                    settings=settings,
                    store=store,
                    pooling=pooling,
                    title=source.name,
                    overlaps=overlaps,
                    copies_bytes=copies_limit(available_bytes(model.device)),
                )
                values = results.start(source.name, digest, source.size_bytes)
                measure(model, context.of_base() if source.name == base_name else context, values)
                results.finish()
                del model
            gc.collect()
    return results.comparison()


@dataclass
class MeasuredModels:
    """The results of the models measured so far.

    Attributes:
        base: Model that the others are compared with, or None.
        settings: What is measured.
        journal: Its entries are the notes of the comparison.
        models: Results of complete models.
        values: Results of `measure`, by model.
        current: Source, digest and size in bytes of the model that is being measured.
    """

    base: str | None
    settings: Evaluate
    journal: Journal
    models: list[ModelResult] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    current: tuple[str, str, int] | None = None

    def start(self, source: str, digest: str, size_bytes: int) -> dict[str, Any]:
        """Start a model; return the mapping that receives its results."""
        self.current = source, digest, size_bytes
        return self.values.setdefault(source, {})

    def finish(self, failed: Mapping[str, str] | None = None) -> None:
        """Add the current model.

        Args:
            failed: Reasons why the evaluation of the model ended early, in addition to those of its tasks.
        """
        assert self.current is not None
        source, digest, size_bytes = self.current
        values = self.values[source]
        base_values = {} if self.base is None or source == self.base else self.values[self.base]
        tasks = values.get("tasks") or {"scores": {}, "failed": {}}
        self.models.append(
            ModelResult(
                source=source,
                digest=digest,
                size_bytes=size_bytes,
                failed={**tasks["failed"], **(failed or {})},
                items=tasks["scores"],
                **combine_all(values, base_values),
            )
        )
        self.current = None

    def comparison(self) -> Comparison:
        """Return the results of all models."""
        notes = [
            f"{'warning: ' if entry.kind == 'warning' else ''}{entry.where}: {entry.message}"
            for entry in self.journal.entries
        ]
        return Comparison(compress=__version__, base=self.base, settings=self.settings, models=self.models, notes=notes)

    @contextmanager
    def reported_on_failure(self, on_failure: Callable[[Comparison], None] | None) -> Iterator[None]:
        """Pass what was measured to `on_failure` if the context raises an error, which is raised again."""
        try:
            yield
        except Exception as error:
            if self.current is not None and any(self.values[self.current[0]].values()):
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}; what follows was not measured"
                self.finish({"evaluation": reason})
            if on_failure is not None and self.models:
                on_failure(self.comparison())
            raise


def recorded_run(source: EvaluatedModel, journal: Journal) -> Reproduction | None:
    """Return what a checkpoint was made from, by its report; None if it has none that can be read.

    Args:
        source: The model.
        journal: Receives a note on a report that cannot be read.
    """
    if source.folder is None:
        return None
    try:
        return reproduction_of(source.folder)
    except ReportError as error:
        journal.add("note", source.name, f"it is unknown which texts its calibration has read: {one_line(error)}")
        return None


def recorded_overlaps(
    run: Reproduction | None, source: str, texts: Mapping[str, Examples], journal: Journal
) -> dict[str, float]:
    """Return the share of the tokens of each text that the calibration of a checkpoint has read.

    Args:
        run: The run that made the checkpoint, if it is known.
        source: Name of the checkpoint in messages.
        texts: Windows of the evaluation texts by name.
        journal: Receives a warning for each text of which it has read tokens.
    """
    sketch = None if run is None else run.calibration_runs
    if sketch is None:
        return {}
    shares = {name: CalibrationRuns.of_sketch(sketch).share_of(windows) for name, windows in texts.items()}
    for name, share in shares.items():
        if share:
            journal.add("warning", source, overlap_in_words(name, share))
    return shares


def _suited(settings: Evaluate, model: PreTrainedModel, journal: Journal) -> Evaluate:
    """Remove what a suite has and the model cannot answer, and fit default windows to it. Raises RecipeError."""
    settings, left_out = suited(settings, model)
    settings, fitted = with_fitting_windows(settings, model, requested_texts(settings, model))
    for note in (*left_out, *fitted):
        journal.add("note", "eval", note.removeprefix("eval: "))
    return settings


def measure(model: PreTrainedModel, context: EvaluationContext, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Measure a model with the evaluators that compare two models.

    Args:
        model: Model on its device.
        context: Texts and settings.
        values: Receives each result as soon as it is known; None for a new mapping.

    Returns:
        The results by key.
    """
    values = {} if values is None else values
    for key, kind in EVALUATORS.items():
        if kind.needs_base:
            values[key] = measure_one(kind(), model, context)
    return values


def headless_error(model: PreTrainedModel, source: str) -> ModelError:
    """Make the error for a model without a language-model head that is not compared with another."""
    return ModelError(
        f"model: {described(model)}, whose quality is its agreement with a base model; name that first: compress eval "
        f"BASE {source}"
    )


def check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: str) -> None:
    """Check that a model is of a supported kind and runs.

    Raises:
        ModelError: if it is not or does not.
    """
    check_supported(model)
    ModelShell(OpenModel.in_memory(model, tokenizer, source)).check()
    objective_of(model, tokenizer)


def texts_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: Evaluate,
    runs: Sequence[Reproduction | None],
    journal: Journal,
) -> dict[str, Examples]:
    """Read the windows of all texts by name.

    Of a text that one of the runs divided between calibration and evaluation, the share of the evaluation is read,
    unless the settings state `divided`.

    Args:
        runs: The runs that made the models, where they are known.
        journal: Receives a note for each text that is divided.

    Raises:
        CalibrationError: for texts that cannot be read.
    """
    calibrated = [use for run in runs if run is not None for use in run.texts if use.part == "calibration"]
    divided = {use.sha256 for use in calibrated if use.share is not None}
    texts, shape = {}, (settings.windows, settings.length, settings.stride)
    with reported_as(*EVALUATED):
        for source in map(as_source, requested_texts(settings, model)):
            windows, use = evaluation_examples(model, tokenizer, source, *shape)
            if use.sha256 in divided and source.divided is None:
                source = source.model_copy(update={"divided": True})
                windows, use = evaluation_examples(model, tokenizer, source, *shape)
                assert use.share is not None
                reason = "the calibration of a run has read the rest; divided: false in a suite reads the whole text"
                journal.add("note", "eval", f"of {source.label}, {use.share.text} are read, as {reason}")
            texts[source.label] = windows
    return texts


def check_same(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: str, common: CommonInputs, base: str
) -> None:
    """Check that a model has the tokenizer, the kind and the features of the first model.

    Raises:
        ModelError: if it has others.
    """
    kind, features = kind_of(model), features_of(model)
    if kind != common.kind and kind is not None and common.kind is not None:
        raise ModelError(f"model: {base} {common.kind.name}, {source} {kind.name}; evaluate them in two calls")
    if features != common.features:
        raise ModelError(f"model: {base} reads {common.features}, {source} {features}; evaluate them in two calls")
    difference = first_difference(common.tokenizer, tokenizer)
    if difference is not None:
        difference = difference.replace("in the teacher", f"in {base}").replace("in the model", f"in {source}")
        raise ModelError(
            f"model: {base} and {source} have different tokenizers ({difference}), so their losses cannot be compared; "
            "evaluate them in two calls"
        )
