"""Evaluate one model, or several on the same windows and items against the first one: what `compress eval` calls."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.sources.files import fingerprint_of
from compress.checkpoint.sources.gguf_codes import checkpoint_of
from compress.checkpoint.sources.load import dtype_to_compare, load
from compress.checkpoint.sources.opening import InMemory, OpenModel
from compress.checkpoint.sources.sentence import pooling_in, read_sentence_files
from compress.checkpoint.sources.stored import weight_files
from compress.checkpoint.sources.supported import check_supported
from compress.checkpoint.sources.vocabulary import first_difference
from compress.data.text_source import as_source
from compress.errors import ModelError
from compress.evaluate import EVALUATORS, combine_all, measure_one
from compress.evaluate.base import EvaluationContext
from compress.evaluate.harness.tasks import check_tasks
from compress.evaluate.store import Store, digest_of
from compress.evaluate.windows import evaluation_ids
from compress.models.kinds.kinds import Kind, described, is_headless, kind_of
from compress.models.kinds.objective import objective_of
from compress.models.structure.blocks import find_blocks
from compress.models.structure.front import Front, front_if_any
from compress.passes.contract.context import Run, device_of
from compress.passes.contract.journal import Journal
from compress.passes.contract.memory import available_bytes, copies_limit
from compress.passes.contract.processes import Processes
from compress.pipeline.progress import shown_progress
from compress.pipeline.texts import suited
from compress.pipeline.texts import texts_of as asked_texts
from compress.recipe.evaluation import Evaluate
from compress.report.evaluation import Evaluation, ModelEvaluation
from compress.sweep.capture import ModelShell
from compress.version import __version__

WORK = Path("out") / "evaluation"
"""The default folder of kept results."""


@dataclass(frozen=True)
class First:
    """What is known of the first model, with which the others are compared. front: of a model of recordings."""

    texts: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None
    kind: Kind | None
    front: Front | None


def evaluate_models(
    sources: Sequence[str],
    settings: Evaluate,
    *,
    base: str | None = None,
    work: Path | None = WORK,
    dtype: str = "auto",
    device: str = "auto",
    journal: Journal | None = None,
    progress: bool = False,
    on_failure: Callable[[Evaluation], None] | None = None,
) -> Evaluation:
    """Measure models one after the other; all but the base are compared with it.

    sources: checkpoint folders, hub ids or .gguf files. base: the model that the others are compared with; by default
    the first of several. work: the folder of kept results, with which a killed evaluation continues; None keeps
    nothing, and measures no divergence. on_failure: gets what was measured before an error, which is then raised; the
    error is among the failures of the last model. With several processes of a launcher, each measures a share of the
    requests, and all return the result.

    Raises ModelError for a folder without a model and for different tokenizers, CalibrationError for texts, RecipeError
    for tasks that do not exist, NumericError for a loss that is NaN.
    """
    check_tasks(settings)
    journal, where = journal or Journal(), device_of(device)
    processes = Processes.launched(cpu=where.type == "cpu")
    base = sources[0] if base is None and len(sources) > 1 else base
    order = list(dict.fromkeys(([] if base is None else [base]) + list(sources)))
    folders = {source: model_folder(source) for source in order}  # errors before the first model is measured
    if base is None:
        settings = settings.model_copy(update={"top_k": None})  # there is nothing to diverge from
    found, first = Measured(base, settings, journal), None
    pooling = pooling_in(read_sentence_files(folders[order[0]])[0])
    console = Console(file=sys.stderr, markup=False, force_jupyter=False)  # also while lm-eval's own bars are hidden
    showing = shown_progress(journal, console) if progress and processes.first else nullcontext()
    with showing, found.told_on_failure(on_failure):
        for source in order:
            digest = digest_of(fingerprint_of(folders[source], weight_files(folders[source])), dtype, __version__)
            store = Store(work, digest, found.models[0].digest if found.models else digest, processes)
            model, tokenizer = load(folders[source], dtype_to_compare(folders[source], dtype, where), where)
            checked(model, tokenizer, source, where)
            if first is None:
                found.settings = settings = _suited(settings, model, journal)
                first = First(texts_of(model, tokenizer, settings), tokenizer, kind_of(model), front_if_any(model))
                if base is None and is_headless(model):
                    raise alone(model, source)
            else:
                check_same(model, tokenizer, source, first, order[0])
            run, copies = Run(where, model.dtype, journal=journal), copies_limit(available_bytes(where))
            about = {"texts": first.texts, "tokenizer": tokenizer, "settings": settings, "pooling": pooling}
            context = EvaluationContext(run, store=store, title=source, copies_bytes=copies, **about)
            size = sum(path.stat().st_size for path in weight_files(folders[source]))
            values = found.begin(source, digest, size)
            measure(model, context.of_base() if source == base else context, values)
            found.end()
            del model
            gc.collect()
    return found.evaluation()


@dataclass
class Measured:
    """What is measured so far.

    models: those that are complete. values: the results of `measure` by model. begun: source, digest and size of the
    model that is measured now.
    """

    base: str | None
    settings: Evaluate
    journal: Journal
    models: list[ModelEvaluation] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: tuple[str, str, int] | None = None

    def begin(self, source: str, digest: str, size_bytes: int) -> dict[str, Any]:
        """Begin with a model; its results go into the mapping that is returned."""
        self.begun = source, digest, size_bytes
        return self.values.setdefault(source, {})

    def end(self, failed: Mapping[str, str] | None = None) -> None:
        """Add the model that was begun. failed: why its evaluation ended early."""
        assert self.begun is not None
        source, values = self.begun[0], self.values[self.begun[0]]
        compared = {} if self.base is None or source == self.base else combine_all(values, self.values[self.base])
        self.models.append(ModelEvaluation.of(*self.begun, values, compared, failed))
        self.begun = None

    def evaluation(self) -> Evaluation:
        """The results of all models."""
        notes = [f"{entry.where}: {entry.message}" for entry in self.journal.entries]
        return Evaluation(compress=__version__, base=self.base, settings=self.settings, models=self.models, notes=notes)

    @contextmanager
    def told_on_failure(self, on_failure: Callable[[Evaluation], None] | None) -> Iterator[None]:
        """Call `on_failure` with what was measured if the work in the context fails; the error is raised again."""
        try:
            yield
        except Exception as error:
            if self.begun is not None and any(self.values[self.begun[0]].values()):
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}; what follows was not measured"
                self.end({"evaluation": reason})
            if on_failure is not None and self.models:
                on_failure(self.evaluation())
            raise


def _suited(settings: Evaluate, model: PreTrainedModel, journal: Journal) -> Evaluate:
    """The settings without what a suite has and the model cannot answer. Raises RecipeError."""
    found, left_out = suited(settings, model)
    for log in left_out:
        journal.add("note", "eval", log)
    return found


def measure(model: PreTrainedModel, context: EvaluationContext, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """The results of the evaluators that compare two models, by key. values: gets each result as it is known."""
    values = {} if values is None else values
    for key, kind in EVALUATORS.items():
        if kind.needs_base:
            values[key] = measure_one(kind(), model, context)
    return values


def alone(model: PreTrainedModel, source: str) -> ModelError:
    """The error of a model without a language-model head that is not compared with another."""
    return ModelError(
        f"model: {described(model)}, whose quality is its agreement with a base model; name that first: compress eval "
        f"BASE {source}"
    )


def model_folder(source: str) -> Path:
    """The local folder of a model. Raises ModelError for a folder without a model."""
    folder = checkpoint_of(source)
    if not (folder / "config.json").is_file():
        raise ModelError(f"model: {source} holds no config.json; write the folder of a model, a hub id or a .gguf file")
    return folder


def checked(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: str, device: Any) -> None:
    """Check that a model is of a supported kind and runs. Raises ModelError."""
    check_supported(model)
    first = next(model.parameters())
    opened = OpenModel(model, find_blocks(model), InMemory(), tokenizer, source, "", device, first.dtype)
    ModelShell(opened).check()
    objective_of(model, tokenizer)


def texts_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: Evaluate
) -> dict[str, Tensor]:
    """The token ids of all texts by name. Raises CalibrationError."""
    shape = settings.windows, settings.length, settings.stride
    texts = asked_texts(settings, model)
    labels = [as_source(text).label for text in texts]
    found = [evaluation_ids(model, tokenizer, text, *shape)[0] for text in texts]
    return dict(zip(labels, found, strict=True))


def check_same(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: str, first: First, base: str
) -> None:
    """Check that a model has the tokenizer, the kind and the features of the base model. Raises ModelError."""
    own, kind, front = kind_of(model), first.kind, front_if_any(model)
    if own != kind and own is not None and kind is not None:
        raise ModelError(f"model: {base} {kind.name}, {source} {own.name}; evaluate them in two calls")
    if front != first.front:
        raise ModelError(f"model: {base} reads {first.front}, {source} {front}; evaluate them in two calls")
    difference = first_difference(first.tokenizer, tokenizer)
    if difference is not None:
        difference = difference.replace("in the teacher", f"in {base}").replace("in the model", f"in {source}")
        raise ModelError(
            f"model: {base} and {source} have different tokenizers ({difference}), so their losses cannot be compared; "
            "evaluate them in two calls"
        )
