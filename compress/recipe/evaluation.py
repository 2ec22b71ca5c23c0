"""The evaluation of a model: texts, tasks and generation, as stated under `eval` of a recipe or in a suite."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ModelWrapValidatorHandler, ValidationError, field_validator, model_validator
from typing_extensions import Self

from compress.data.text_source import PathText, TextSource, as_source
from compress.errors import RecipeError, did_you_mean
from compress.passes.contract.options import OptionError, Options, option_error
from compress.recipe.calibration import EvaluatedTexts
from compress.recipe.yaml import compose, read_file

SUITE = "suite"
"""The key of a suite in the values of `eval`."""

PROMPTED = ("tasks", "generation", "speed")
"""The options for models that answer prompts. For other models they are left out if only a suite states them, which
`model_fields_set` does not count, and otherwise an error."""


class QualityLimits(Options):
    """Limits of what a model may lose; a measured value above one ends the command with exit code 3."""

    kl: float | None = Field(
        default=None, gt=0, description="largest KL divergence from the base on a text, nats per token"
    )
    loss: float | None = Field(default=None, gt=0, description="largest increase of the loss on a text, nats per token")
    task_drop: float | None = Field(default=None, gt=0, description="largest drop of a metric of a task")

    @classmethod
    def key(cls) -> str:
        """Return the key in a recipe."""
        return "fail_if"

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.kl is None and self.loss is None and self.task_drop is None:
            raise ValueError("names no limit; write fail_if: {kl: 0.2}, with any of kl, loss and task_drop")
        return self


class Evaluate(Options):
    """The evaluation of the reloaded checkpoint and of the base model.

    A recipe states it as a mapping of options, as the name of a suite, or as a mapping with `suite: NAME` whose other
    options replace those of the suite.
    """

    @classmethod
    def key(cls) -> str:
        """Return the key in a recipe."""
        return "eval"

    perplexity: EvaluatedTexts = Field(
        default=("embedded",), description="texts: sources, or mappings such as {dataset: NAME, split: test}"
    )
    agreement: EvaluatedTexts = Field(
        default=("embedded",),
        description="instead of perplexity, for models without a language-model head: texts on which their embeddings, "
        "classes or spans are compared with the base model's",
    )
    windows: int | None = Field(
        default=16, gt=0, description="windows per text, or all of a text that has fewer; null: all"
    )
    length: int | None = Field(default=512, gt=1, description="tokens per window; null: those of a .npy file")
    stride: int | None = Field(
        default=None, gt=0, description="tokens from one window to the next, each token is scored once; null: length"
    )
    chunk: int | None = Field(
        default=None,
        gt=0,
        description="tokens of a window that the model reads at a time, with its KV cache between them; 1: as in "
        "decoding, which shows a `residual` of kv_cache; null: all at once, which is much faster",
    )
    top_k: int | None = Field(
        default=128,
        gt=0,
        description="most likely tokens of the base model that the divergence compares; null: no divergence",
    )
    tasks: tuple[str, ...] = Field(default=(), description="tasks of lm-eval, by name or as a YAML file")
    data: PathText = Field(
        default=None, description="folder with the data of tasks (TASK/SPLIT.parquet) and task files; null: the hub"
    )
    limit: int | None = Field(default=None, gt=0, description="items of each task, from its start; null: all")
    fewshot: int | None = Field(
        default=None, ge=0, description="worked examples in each prompt of a task; null: as the task says"
    )
    chat_template: bool = Field(default=False, description="put the prompts of tasks into the model's chat template")
    generation: bool = Field(default=False, description="compare greedy answers to fixed prompts")
    speed: bool = Field(default=False, description="measure decoding and prefill of both models, which takes a minute")
    seed: int = Field(default=1234, ge=0, description="seed of the choice of worked examples")
    fail_if: QualityLimits | None = Field(
        default=None, description="limits {kl, loss, task_drop}: a larger value ends the command with exit code 3"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _with_suite(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Accept the name of a suite, alone or among the options."""
        options = {SUITE: values} if isinstance(values, str) else values
        if not isinstance(options, Mapping) or SUITE not in options:
            return handler(values)
        changes = {key: value for key, value in options.items() if key != SUITE}
        try:
            suite_options = suite_values(options[SUITE])
        except RecipeError as error:
            raise OptionError((SUITE,), str(error)) from error
        return handler(suite_options | changes).stated(changes)

    def stated(self, changes: Mapping[str, Any]) -> Self:
        """Return the same evaluation in which only `changes` count as stated among the options that fit the model."""
        self.model_fields_set.difference_update({*PROMPTED, "windows", "length"} - set(changes))
        return self

    def texts_for(self, head: bool, model: str) -> tuple[TextSource | str, ...]:
        """Return the texts for a model with or without a language-model head.

        Args:
            head: whether the model has a language-model head.
            model: description of the model, the subject of the error message.

        Raises:
            RecipeError: if only texts for the other kind of models are stated.
        """
        expected, wrong = ("perplexity", "agreement") if head else ("agreement", "perplexity")
        if wrong in self.model_fields_set and expected not in self.model_fields_set:
            written: tuple[TextSource | str, ...] = getattr(self, wrong)
            if written:
                texts = ", ".join(as_source(text).label for text in written)
                reason = "so its loss is measured" if head else "which has no perplexity"
                message = f"eval: {model}, {reason}; write {expected}: [{texts}] instead of {wrong}"
                raise RecipeError(message, ("eval", wrong))
            return ()
        return getattr(self, expected)

    @field_validator("perplexity", "agreement")
    @classmethod
    def _different(cls, texts: tuple[TextSource | str, ...]) -> tuple[TextSource | str, ...]:
        labels = [as_source(text).label for text in texts]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"{twice[0]} is listed twice; remove one of them")
        if "self" in labels:
            raise ValueError("self is sampled from the model, which is no text to measure; use another source")
        return texts

    @model_validator(mode="after")
    def _measures_what_is_limited(self) -> Self:
        limits = self.fail_if
        if limits is not None and limits.task_drop is not None and not self.tasks:
            raise ValueError("fail_if: task_drop has no effect without tasks; write tasks: [arc_easy], or leave it out")
        if self.chunk is not None and self.length is not None and self.chunk >= self.length:
            raise ValueError(
                f"chunk: {self.chunk} has no effect with length: {self.length}; write a smaller one, or leave it out"
            )
        if limits is not None and limits.kl is not None and self.top_k is None:
            raise ValueError("fail_if: kl needs the KL divergence, which top_k: null leaves out; write top_k: 128")
        return self

    @field_validator("tasks")
    @classmethod
    def _each_once(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [task for task in tasks if tasks.count(task) > 1]:
            raise ValueError(f"{twice[0]} is listed twice; remove one of them")
        return tasks


@cache
def suites() -> dict[str, str]:
    """Return the YAML text of every suite by name."""
    folder = files("compress.recipe").joinpath("suites")
    suite_files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in suite_files}


def suite_values(name: Any) -> dict[str, Any]:
    """Return the plain values of a suite.

    Args:
        name: name of a built-in suite or path of a YAML file.

    Raises:
        RecipeError: if there is no such suite or its file is not a mapping of options.
    """
    text_by_name = suites()
    if isinstance(name, str) and name in text_by_name:
        return yaml.safe_load(text_by_name[name])
    if not isinstance(name, str) or not name.endswith((".yaml", ".yml")):
        near = did_you_mean(str(name), text_by_name)
        raise RecipeError(f"suite {name!r} is not known{near}; or write the path of a YAML file")
    try:
        values = compose(read_file(Path(name)), name)[0]
    except RecipeError as error:
        raise RecipeError(f"suite {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"suite {name}: must be a mapping of options, such as tasks: [arc_easy]")
    return values


def read_suite(name: str, **changes: Any) -> Evaluate:
    """Return the evaluation of a suite with some options changed.

    Raises:
        RecipeError: if the suite is unknown or an option is invalid.
    """
    try:
        return Evaluate.model_validate({**suite_values(name), **changes}).stated(changes)
    except ValidationError as error:
        raise option_error(error, Evaluate, owner=f"suite {name}:") from None
