"""The kinds of models, and which of them a model is of."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CalibrationError, ModelError
from compress.models.kinds.batch import Batch, Examples
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.classifiers import SequenceClassifier, TokenClassifier
from compress.models.kinds.contract import SUPPORTED, ModelKind, text_config
from compress.models.kinds.encoder_decoder import EncoderDecoder
from compress.models.kinds.masked import MaskedLM
from compress.models.kinds.question_answering import QuestionAnswering
from compress.models.kinds.sentence_encoder import SentenceEncoder
from compress.models.kinds.speech import Speech
from compress.models.kinds.vision_language import VisionLanguage

KINDS: tuple[ModelKind, ...] = (
    MaskedLM(),
    Speech(),
    EncoderDecoder(),
    VisionLanguage(),
    CAUSAL,
    SequenceClassifier(),
    TokenClassifier(),
    QuestionAnswering(),
    SentenceEncoder(),
)
"""All kinds; a model is of the first one that matches."""

UNKNOWN = "is of no supported kind"


def kind_of(model: nn.Module) -> ModelKind | None:
    """Return the kind of a model; None if it is of none. Only its class, configuration and modules are read."""
    return next((kind for kind in KINDS if kind.matches(model)), None)


def adapter_of(model: nn.Module) -> ModelKind:
    """Return the kind of a model. Raises ModelError for a model of none."""
    kind = kind_of(model)
    if kind is None:
        raise ModelError(f"model: {described(model)}; {SUPPORTED}")
    return kind


def objective_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, seed: int = 0) -> ModelKind:
    """Return the kind of a model with what its loss needs of the model and its tokenizer.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        seed: of masks.

    Raises:
        ModelError: when the model predicts masked tokens but its tokenizer has no mask token.
    """
    return adapter_of(model).bound(model, tokenizer, seed)


def examples_of(
    model: PreTrainedModel,
    data: Int[Tensor, "sequences length"] | Mapping[str, Any] | Examples,
    place: str = "calibration",
) -> Examples:
    """Return the examples that a caller gives: token ids, or a batch as a data collator of transformers returns it.

    Args:
        model: the model that reads them.
        data: the examples.
        place: beginning of messages.

    Raises:
        CalibrationError: for empty ids, and for data of another kind of model.
    """
    kind = adapter_of(model)
    if isinstance(data, Examples):
        arguments = inspect.signature(model.forward).parameters
        unknown = [name for name in data[0].inputs if name not in arguments]
        if unknown:
            raise CalibrationError(f"{place}: {described(model)} and takes no {', '.join(unknown)}; give {kind.media}")
        return data
    if isinstance(data, Mapping):
        examples = kind.of_mapping(model, data, place)
        noun = "example" if kind.lists is None else kind.lists.plural.removesuffix("s")
        kind.check(model, examples, [f"{place}: {noun} {i}" for i in range(len(examples))])
        return examples
    if data.dim() != 2 or not data.numel():
        raise CalibrationError(f"{place}: holds no tokens ({list(data.shape)}); use token ids [sequences, length]")
    return kind.of_ids(model, data)


def answer_shape(model: nn.Module, batch: Batch) -> tuple[int, ...]:
    """Return the shape of a model's answer to a batch, without its last axis."""
    kind = kind_of(model)
    return (len(batch),) if kind is not None and not kind.per_token else (len(batch), batch.places)


def described(model: nn.Module) -> str:
    """Return a model in the words of a message: its class and its kind."""
    kind = kind_of(model)
    return f"{type(model).__name__} {UNKNOWN if kind is None else kind.name}"


def most_tokens(model: PreTrainedModel) -> int | None:
    """Return the most tokens that a sequence may have, of all its texts; None without a limit."""
    positions: int | None = getattr(text_config(model.config), "max_position_embeddings", None)
    if positions is None or positions <= 0:  # some configurations say -1: no limit
        return None
    return adapter_of(model).texts * positions


def is_headless(model: nn.Module) -> bool:
    """Return whether a model is of one of the kinds without a language-model head."""
    kind = kind_of(model)
    return kind is not None and not kind.learns


def answers_prompts(model: PreTrainedModel) -> bool:
    """Return whether a model generates text from a prompt of text."""
    kind = kind_of(model)
    return model.can_generate() and (kind is None or kind.prompts)


def answers_tasks(model: PreTrainedModel) -> bool:
    """Return whether a model answers tasks of lm-eval, by its probabilities of next tokens."""
    kind = kind_of(model)
    return model.can_generate() and (kind is None or kind.texts == 1)


def prompt_length(model: nn.Module, ids: Int[Tensor, "prompts length"]) -> int:
    """Return the tokens before the answer in what `generate` returns: the prompt, or a decoder's start token."""
    kind = kind_of(model)
    return ids.shape[1] if kind is None or kind.texts == 1 else 1


def features_of(model: PreTrainedModel) -> object | None:
    """Return the features that a model reads besides token ids; None for none."""
    kind = kind_of(model)
    return None if kind is None else kind.features(model)
