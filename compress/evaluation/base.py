"""Evaluator: one measurement of a model, with one signature for all of them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.evaluation.store import Store
from compress.models.kinds.batch import Batch, Examples
from compress.models.terms import Pooling
from compress.passes.contract.context import Run
from compress.passes.contract.passes import Step
from compress.recipe.evaluation import Evaluate

Texts = Mapping[str, Examples]
"""The windows of the evaluation texts, by the name of the text."""


@dataclass(frozen=True)
class EvaluationContext:
    """The run that a model comes from.

    Attributes:
        run: Its device, storage dtype, format and journal.
        role: Whether the base or the compressed model is measured.
        texts: The evaluation texts.
        tokenizer: None if the model comes without one.
        probe: A sequence of the calibration data; None outside of a run.
        steps: The passes of the recipe with the layers that they work on.
        layers: The `LayerResult` of every pass and layer, as mappings.
        settings: What is measured.
        store: Where results are stored.
        base: Source of the base model; None outside of a run.
        pooling: How embeddings are computed from hidden states.
        title: The model's name in messages of progress; empty: by `role`.
        overlaps: Share of the tokens of each text that the calibration of the compressed model has read, by name.
        copies_bytes: Limit of memory for the copies that kernels make of packed weights (`inference.copies_within`).
    """

    run: Run
    role: Literal["base", "compressed"] = "compressed"
    texts: Texts = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    probe: Batch | None = None
    steps: Sequence[Step] = ()
    layers: Sequence[Mapping[str, Any]] = ()
    settings: Evaluate = field(default_factory=Evaluate)
    base: str | None = None
    store: Store = field(default_factory=Store)
    pooling: Pooling = "mean"
    title: str = ""
    overlaps: Mapping[str, float] = field(default_factory=dict)
    copies_bytes: int = sys.maxsize

    @property
    def model(self) -> str:
        """The measured model in messages of progress."""
        return self.title or f"the {self.role} model"

    def of_base(self) -> EvaluationContext:
        """Return the context of the base model."""
        return replace(self, role="base", store=self.store.of_base())

    def progress(self, message: str) -> Callable[[int, int], None]:
        """Return a function that reports progress as (number of finished items, number of items)."""
        return lambda count, of: self.run.journal.add("progress", "evaluate", message, done=count, of=of)


class Evaluator(BaseModel, ABC):
    """One measurement. An evaluator is its configuration: a frozen value whose fields are its options.

    An evaluator is one file of this folder; the file's name is its key in report.json. Its value has the type that the
    measurement of the same name states (`compress.results.measurements`).

    Attributes:
        needs_base: Whether the base model is measured too, or only the compressed one.
        timed: Whether seconds are its result, so that the model is measured as it is used, in any memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    needs_base: ClassVar[bool] = False
    timed: ClassVar[bool] = False

    @abstractmethod
    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        """Measure one model; the result is plain JSON, or None if the measurement does not apply to this model."""

    def combine(self, compressed: dict[str, Any] | None, base: dict[str, Any] | None) -> Any:
        """Compute the value in report.json from the results of `measure` on both models.

        Args:
            compressed: Result of the measured model.
            base: Result of the base model; None unless `needs_base`, and for a model that is not compared.
        """
        return {"base": base, "compressed": compressed} if self.needs_base else compressed
