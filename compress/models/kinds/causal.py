"""Causal language models: predict each token from the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import ModelError
from compress.models.kinds.batch import IDS, IGNORED, Batch, Examples
from compress.models.kinds.contract import ModelKind, is_masked
from compress.models.terms import NEXT_TOKENS


@dataclass(frozen=True)
class CausalLM(ModelKind):
    """Models of next tokens; the first token of a sequence is no target.

    A model with an output head that is no listed masked language model counts as one, and so does every model that is
    none of transformers.
    """

    name: ClassVar[str] = "predicts next tokens"
    auto: ClassVar[str] = "AutoModelForCausalLM"
    task: ClassVar[str] = "text-generation"
    predicts: ClassVar[str] = NEXT_TOKENS
    streams: ClassVar[bool] = True
    shift: ClassVar[int] = 1

    def matches(self, model: nn.Module) -> bool:
        config = getattr(model, "config", None)
        if not isinstance(model, PreTrainedModel) or not isinstance(config, PretrainedConfig):
            return True
        is_other_kind = getattr(config, "is_encoder_decoder", False) or is_masked(type(model), config)
        return not is_other_kind and model.get_output_embeddings() is not None

    def read(self, model: nn.Module, examples: Examples, rows: Sequence[int], **options: Any) -> Any:
        """Run a model. Raises ModelError for a model of another kind."""
        if not self.matches(model):
            raise ModelError(f"model: {type(model).__name__} does not predict next tokens; use objective_of")
        return super().read(model, examples, rows, **options)

    def labels(self, example: Batch) -> Tensor:
        labels = (example.inputs[IDS] if example.labels is None else example.labels).roll(-1, 1)
        labels[:, -1] = IGNORED
        return labels


CAUSAL = CausalLM()
