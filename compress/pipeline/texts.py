"""The texts of a recipe on a model: checks before the run, calibration and evaluation examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from compress.checkpoint.opened import OpenModel
from compress.data.dataset_rows import origin
from compress.data.ids import Sample, check_text, model_sample
from compress.data.overlap import overlap_of
from compress.data.records import TextUse
from compress.data.text_source import GivenText, Part, TextSource, as_source
from compress.errors import RecipeError, reported_as
from compress.evaluation.harness.tasks import check_tasks
from compress.evaluation.windows import check_windows, evaluation_examples
from compress.models.kinds.batch import Examples
from compress.models.kinds.kinds import adapter_of, answers_prompts, answers_tasks, described, is_headless
from compress.passes.contract.problems import Problems
from compress.pipeline.sampled_text import sampled_ids
from compress.recipe.evaluation import Evaluate
from compress.recipe.schema import Recipe

PROBE_TOKENS = 64  # length of the probe: enough for proofs, cheap at every block

Text = TypeVar("Text", bound=TextSource)
EVALUATED = "eval", "calibration", "test"
"""The key of the evaluation in a recipe, and the beginnings of errors of its texts that it replaces."""

Wanted = TypeVar("Wanted", Evaluate, Evaluate | None)


def texts_of(settings: Evaluate | None, model: PreTrainedModel) -> tuple[TextSource | str, ...]:
    """Return the texts to evaluate a model on; empty for `eval: null`. Raises RecipeError for unsuitable texts."""
    return () if settings is None else settings.texts_for(not is_headless(model), described(model))


def suited(settings: Wanted, model: PreTrainedModel) -> tuple[Wanted, tuple[str, ...]]:
    """Return the evaluation without what a suite has and the model cannot answer, and a note on what is left out.

    Raises RecipeError where the recipe itself states it.
    """
    unfit: dict[str, Any] = {} if answers_prompts(model) else {"generation": False, "speed": False}
    unfit |= {} if answers_tasks(model) else {"tasks": ()}
    unanswered = [name for name in unfit if settings is not None and getattr(settings, name)]
    if settings is None or not unanswered:
        return settings, ()
    for name in unanswered:
        if name in settings.model_fields_set:
            reason = "answers no tasks, which need next tokens" if name == "tasks" else "answers no prompts of text"
            raise RecipeError(f"eval {name}: {described(model)} and {reason}; leave {name} out", ("eval", name))
    note = f"{described(model)}, so {' and '.join(unanswered)} of the suite are left out"
    return settings.model_copy(update={name: unfit[name] for name in unanswered}), (note,)


def divided_as_in(inputs: Mapping[str, Any], recipe: Recipe, model: PreTrainedModel) -> Recipe:
    """Return a recipe whose calibration texts are divided as in an earlier run, whatever the evaluation reads now.

    So another evaluation of a complete run is no other run. Evaluation texts that its calibration has read whole are
    read whole, too, with a warning.

    Args:
        inputs: inputs of the earlier run (`provenance.inputs_of`); empty if there is none.
        recipe: the recipe.
        model: its model.
    """
    recorded = inputs.get("recipe", {}).get("calibration", {})
    calibration = recipe.calibration
    names = set(TextSource.model_fields) - {"divided"}
    earlier = [recorded] if calibration.mixture is None else recorded.get("mixture") or []
    undivided: set[tuple[str, ...] | None] = set()

    def as_recorded(text: Text) -> Text:
        values = text.model_dump(mode="json")
        same = [part for part in earlier if all(part.get(name) == values[name] for name in names)]
        if text.divided is not None or not same or isinstance(text, GivenText):  # other data look alike in a record
            return text
        if not same[0]["divided"]:
            undivided.add(origin(text, "calibration"))
        return text.model_copy(update={"divided": same[0]["divided"]})

    if calibration.mixture is None:
        calibration = as_recorded(calibration)
    else:
        calibration = calibration.model_copy(update={"mixture": tuple(map(as_recorded, calibration.mixture))})
    settings = recipe.eval
    if settings is not None:
        key = "agreement" if is_headless(model) else "perplexity"
        texts = [as_source(text) for text in texts_of(settings, model)]
        is_whole = [text.divided is None and origin(text, "test") in undivided - {None} for text in texts]
        if any(is_whole):
            pairs = zip(texts, is_whole, strict=True)
            texts = [text.model_copy(update={"divided": False}) if mark else text for text, mark in pairs]
            settings = settings.model_copy(update={key: tuple(texts)})
    return recipe.model_copy(update={"calibration": calibration, "eval": settings})


def with_divided_texts(recipe: Recipe, model: PreTrainedModel) -> Recipe:
    """Return the recipe in which texts that both the calibration and the evaluation read are divided between them.

    What the recipe states (`divided`) stays; `divided: false` of one part is that of the other part too.

    Raises:
        RecipeError: for a text of which the two parts read different numbers of rows.
    """
    evaluated, calibration = [as_source(text) for text in texts_of(recipe.eval, model)], recipe.calibration
    texts_by_part: dict[Part, list[TextSource]] = {
        "calibration": [text for text, _ in calibration.texts()],
        "test": evaluated,
    }
    uses: dict[tuple[str, ...], dict[Part, list[TextSource]]] = {}
    for part, texts in texts_by_part.items():
        for text in texts:
            if (place := origin(text, part)) is not None:
                uses.setdefault(place, {}).setdefault(part, []).append(text)
    divided: set[tuple[str, ...]] = set()
    for place, parts in uses.items():
        together = [text for texts in parts.values() for text in texts]
        if len(parts) < len(texts_by_part) or any(text.divided is False for text in together):
            continue
        if len({text.streaming for text in together}) > 1:
            raise RecipeError(
                f"calibration and eval read {together[0].label}, one of them with streaming, so it cannot be divided; "
                "write streaming: true for both, or another split for one"
            )
        limits = {text.max_documents if text.dataset is not None else None for text in together}
        if len(limits) > 1:
            raise RecipeError(
                f"calibration and eval read {together[0].label} with different max_documents "
                f"({', '.join(sorted(map(str, limits)))}), so it cannot be divided; write the same for both"
            )
        divided.add(place)
    if recipe.eval is None or not divided:
        return recipe

    def stated(text: Text, part: Part) -> Text:
        is_divided = text.divided is None and origin(text, part) in divided
        return text.model_copy(update={"divided": True}) if is_divided else text

    if calibration.mixture is None:
        calibration = stated(calibration, "calibration")
    else:
        mixture = tuple(stated(text, "calibration") for text in calibration.mixture)
        calibration = calibration.model_copy(update={"mixture": mixture})
    key = "agreement" if is_headless(model) else "perplexity"
    settings = recipe.eval.model_copy(update={key: tuple(stated(text, "test") for text in evaluated)})
    return recipe.model_copy(update={"calibration": calibration, "eval": settings})


NOT_IN_RECIPE = "are not part of the recipe, which alone does not repeat this run; pass the same data to compress.run"
"""The end of a note on data of a program."""


def given_texts(recipe: Recipe, opened: OpenModel) -> list[GivenText]:
    """Return the texts of a recipe that a program passed to `run`."""
    evaluated = [as_source(text) for text in texts_of(recipe.eval, opened.model)]
    texts = [text for text, _ in recipe.calibration.texts()] + evaluated
    return [text for text in texts if isinstance(text, GivenText)]


def check_texts(recipe: Recipe, opened: OpenModel) -> None:
    """Check all texts as far as possible without reading them or asking the hub; the model may be without weights.

    Raises CalibrationError: a missing file, an unknown source, sequences longer than the model's positions, no
    tokenizer. SeveralErrors for several of them.
    """
    problems, text_reader, settings = Problems(), (opened.model, opened.tokenizer), recipe.eval
    for text, count in recipe.calibration.texts():
        problems.attempt(check_text, *text_reader, text, "calibration", count, recipe.calibration.length)
    for text in problems.attempt(texts_of, settings, opened.model) or ():
        assert settings is not None
        problems.attempt(_check_evaluated, opened, text, settings)
    problems.check()


def _check_evaluated(opened: OpenModel, text: TextSource | str, settings: Evaluate) -> None:
    with reported_as(*EVALUATED):
        check_windows(opened.model, settings.stride, settings.chunk)
        check_text(opened.model, opened.tokenizer, as_source(text), "test", settings.windows, settings.length)


def calibration_examples(
    recipe: Recipe, opened: OpenModel, memory_bytes: int | None = None
) -> tuple[Examples, list[TextUse]]:
    """The recipe's calibration examples, and the use of each of its texts.

    The sequences of a mixture are shuffled, so that each batch holds sequences of several texts. memory_bytes: limit of
    memory in which a text is sampled; None: what is available.

    Raises CalibrationError: the text is missing or too short, ids exceed the vocabulary, or there is no tokenizer.
    """
    samples = [
        _calibration_sample(recipe, text, count, opened, memory_bytes) for text, count in recipe.calibration.texts()
    ]
    examples = Examples(tuple(example for part, _ in samples for example in part))
    if len(samples) > 1:
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(recipe.seed))
        examples = examples[order.tolist()]
    return examples, [use for _, use in samples]


def _calibration_sample(
    recipe: Recipe, text: TextSource, count: int | None, opened: OpenModel, memory_bytes: int | None
) -> Sample:
    length = recipe.calibration.length
    if not text.sampled:
        return model_sample(opened.model, opened.tokenizer, text, "calibration", count, length, recipe.seed)
    check_text(opened.model, opened.tokenizer, text, "calibration", count, length)
    ids, has_bos = sampled_ids(opened, text, count or 64, length or 512, recipe.seed, memory_bytes)
    examples = adapter_of(opened.model).of_ids(opened.model, ids)
    return examples, TextUse.of_examples(text.label, "calibration", examples, bos=has_bos)


def overlaps_of(texts: Mapping[str, Examples], calibration: Examples) -> dict[str, float]:
    """Return the share of the tokens of each evaluation text that the calibration has read (`overlap_of`)."""
    return {name: overlap_of(calibration, windows) for name, windows in texts.items()}


def eval_examples(recipe: Recipe, opened: OpenModel) -> list[Sample]:
    """Return the windows of every evaluation text, and its use; empty for `eval: null`.

    The names of tasks are checked, too (`check_tasks`).
    """
    settings, text_reader = recipe.eval, (opened.model, opened.tokenizer)
    if settings is None:
        return []
    check_tasks(settings)
    shape = settings.windows, settings.length, settings.stride
    with reported_as(*EVALUATED):
        return [
            evaluation_examples(*text_reader, text, *shape, recipe.seed) for text in texts_of(settings, opened.model)
        ]
