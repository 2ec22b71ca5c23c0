"""What the kinds without a language-model head share: a text has no targets, only a teacher has outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import ModelError, RecipeError
from compress.models.kinds.batch import IDS, IGNORED, Batch, Examples
from compress.models.kinds.contract import DISTRIBUTIONS, ModelKind, required_answer
from compress.models.terms import Compared


@dataclass(frozen=True)
class Headless(ModelKind):
    """Models without a loss on a text; two of them agree in their outputs.

    Attributes:
        model: a bound model in the words of a message.
        outputs: what is compared of a bound model.
    """

    predicts: ClassVar[str] = "outputs"
    learns: ClassVar[bool] = False

    model: str = ""
    outputs: Compared = "embeddings"

    def bound(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, seed: int) -> ModelKind:
        return type(self)(f"{type(model).__name__} {self.name}", self.compared_in(model.config))

    def labels(self, example: Batch) -> Tensor:
        return torch.full_like(example.inputs[IDS], IGNORED)

    def answers(self, logits: Tensor, examples: Examples, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        raise ModelError(f"model: {self.model} without a language-model head: it has no loss on a text")

    def predictions(self, output: Any) -> Tensor | None:
        return DISTRIBUTIONS[self.outputs](required_answer(output))

    def values(self, output: Any) -> Tensor:
        answer = required_answer(output)
        return answer.flatten()[None] if self.outputs == "score" else answer


def check_learns(lm_objective: ModelKind, label: str, remedy: str) -> None:
    """Raise RecipeError where a pass needs a loss on the text and there is none.

    Args:
        lm_objective: kind of the model.
        label: label of the pass.
        remedy: end of the message.
    """
    if isinstance(lm_objective, Headless):
        raise RecipeError(
            f"{label}: {lm_objective.model} without a language-model head, so it has no loss on the text; {remedy}"
        )
