"""Classifiers of sequences and of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from compress.models.kinds.batch import Examples
from compress.models.kinds.contract import run_on, text_config
from compress.models.kinds.headless import Headless
from compress.models.terms import Compared


@dataclass(frozen=True)
class TokenClassifier(Headless):
    """Models with a class for each token."""

    name: ClassVar[str] = "is a token classifier"
    auto: ClassVar[str] = "AutoModelForTokenClassification"
    task: ClassVar[str] = "token-classification"
    compared: ClassVar[Compared] = "classes"

    def compared_in(self, config: Any) -> Compared:
        """Return what is compared: classifiers differ in the number of their labels."""
        if getattr(config, "problem_type", None) == "multi_label_classification":
            return "labels"
        return "score" if getattr(config, "num_labels", None) == 1 else "classes"


@dataclass(frozen=True)
class SequenceClassifier(TokenClassifier):
    """Models with classes, labels or a score for each sequence."""

    name: ClassVar[str] = "is a sequence classifier"
    auto: ClassVar[str] = "AutoModelForSequenceClassification"
    task: ClassVar[str] = "text-classification"
    per_token: ClassVar[bool] = False

    def read(self, model: nn.Module, examples: Examples, rows: Sequence[int], **options: Any) -> Any:
        """Run a model; one that looks for the last token that is no padding refuses a batch without padding token."""
        if getattr(text_config(getattr(model, "config", None)), "pad_token_id", None) is not None:
            return super().read(model, examples, rows, **options)
        outputs = [run_on(model, example, **options) for example in examples]
        states = zip(*(output.hidden_states for output in outputs), strict=True) if outputs[0].hidden_states else ()
        logits = torch.cat([output.logits for output in outputs])
        return SequenceClassifierOutput(
            logits=logits, hidden_states=tuple(torch.cat(layer_states) for layer_states in states) or None
        )
