"""The kinds of models: how transformers lists them, what they return, and what is compared of two such models.

A kind is told by transformers' auto classes, from the class of a model and its configuration. What a model returns is
told by the fields of its output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.models.kinds.recordings import FEATURES

Compared = Literal["tokens", "classes", "labels", "score", "spans", "embeddings"]
"""What is compared of two models: probabilities of tokens, of classes, of each label for itself, one score, the start
and the end of a span, or embeddings."""

ANSWERS = (("logits",), ("start_logits", "end_logits"), ("last_hidden_state",))
"""The fields of an output that are the answer of a model; the first that an output has."""


@dataclass(frozen=True)
class Kind:
    """A kind of models.

    name: what a model of it is or does, as messages say it. auto: transformers' auto class, by which it is told. task:
    the hub's name for its task. compared: what is compared by default. each: whether the answer has a row for every
    token; otherwise one for every sequence. texts: the texts that a sequence consists of: 2 for a model with an encoder
    and a decoder, a recording and its transcript included.
    """

    name: str
    auto: str
    task: str
    compared: Compared
    each: bool = True
    texts: int = 1

    def compared_in(self, config: Any) -> Compared:
        """What is compared of models with this configuration: classifiers differ in the number of their labels."""
        if self.compared != "classes":
            return self.compared
        if getattr(config, "problem_type", None) == "multi_label_classification":
            return "labels"
        return "score" if getattr(config, "num_labels", None) == 1 else "classes"


CAUSAL = Kind("predicts next tokens", "AutoModelForCausalLM", "text-generation", "tokens")
MASKED = Kind("predicts masked tokens", "AutoModelForMaskedLM", "fill-mask", "tokens")
PAIRED = Kind(
    "predicts target tokens from a source text", "AutoModelForSeq2SeqLM", "text2text-generation", "tokens", texts=2
)
RECORDED = Kind(
    "transcribes recordings", "AutoModelForSpeechSeq2Seq", "automatic-speech-recognition", "tokens", texts=2
)
"""Models with an encoder of recordings and a decoder of their transcripts; the features are their main input."""
HEADLESS = (
    Kind(
        "is a sequence classifier", "AutoModelForSequenceClassification", "text-classification", "classes", each=False
    ),
    Kind("is a token classifier", "AutoModelForTokenClassification", "token-classification", "classes"),
    Kind("is a question answering model", "AutoModelForQuestionAnswering", "question-answering", "spans"),
    Kind("is an encoder", "AutoModel", "feature-extraction", "embeddings"),
)
"""The kinds without a language-model head."""

SUPPORTED = (
    "supported are models that predict next, masked or target tokens, or transcripts of recordings, and without a "
    "language-model head encoders, sequence classifiers, token classifiers and models for extractive question answering"
)


UNKNOWN = "is of no supported kind"


def listed(kind: type, config: PretrainedConfig | None, auto: str) -> bool:
    """Whether transformers lists a class of models under an auto class."""
    found: Any = getattr(transformers, auto)
    return issubclass(kind, found._model_mapping.get(type(config), ()))


def is_masked(kind: type, config: PretrainedConfig | None) -> bool:
    """Whether transformers lists a class among the masked language models and not among the causal ones."""
    masked, causal = (listed(kind, config, each.auto) for each in (MASKED, CAUSAL))
    return masked and not causal and not getattr(config, "is_encoder_decoder", False)


def kind_of(model: nn.Module) -> Kind | None:
    """The kind of a model; None if it is none of those in this file.

    A model with an output head that is no listed masked language model counts as a model of next tokens. Only its
    class, its configuration and its modules are read.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or not isinstance(config, PretrainedConfig):
        return CAUSAL
    if is_masked(type(model), config):
        return MASKED
    if getattr(config, "is_encoder_decoder", False):
        known = RECORDED if model.main_input_name in FEATURES else PAIRED
        return known if listed(type(model), config, known.auto) else None
    if model.get_output_embeddings() is not None:
        return CAUSAL
    return next((kind for kind in HEADLESS if listed(type(model), config, kind.auto)), None)


def is_headless(model: nn.Module) -> bool:
    """Whether a model is of one of the kinds without a language-model head."""
    return kind_of(model) in HEADLESS


def reads_whole_texts(model: nn.Module) -> bool:
    """Whether a model reads a text between the special tokens of its tokenizer, not as a part of a stream."""
    return kind_of(model) not in (CAUSAL, None)


def texts_in_row(model: nn.Module) -> int:
    """The texts in a sequence of a model: 2 for a source, or a recording, and its target, otherwise 1."""
    kind = kind_of(model)
    return 1 if kind is None else kind.texts


def answers_prompts(model: PreTrainedModel) -> bool:
    """Whether a model generates text from a prompt of text."""
    return model.can_generate() and kind_of(model) is not RECORDED


def answers_tasks(model: PreTrainedModel) -> bool:
    """Whether a model answers tasks of lm-eval, by its probabilities of next tokens."""
    return model.can_generate() and texts_in_row(model) == 1


def described(model: nn.Module) -> str:
    """A model in the words of a message: its class and its kind."""
    kind = kind_of(model)
    return f"{type(model).__name__} {UNKNOWN if kind is None else kind.name}"


def answer_of(output: Any) -> Tensor | None:
    """The answer in the output of a model: its logits, [rows, length, 2] for the two ends of a span, or hidden states.

    None for an output without any of `ANSWERS`.
    """
    for names in ANSWERS:
        found: list[Any] = [getattr(output, name, None) for name in names]
        if all(isinstance(one, Tensor) for one in found):
            return found[0] if len(found) == 1 else torch.stack(found, dim=-1)
    return None


def _of_labels(answer: Tensor) -> Tensor:
    """softmax over (x, 0) is the sigmoid of x, the probability of a label for itself."""
    return torch.stack([answer, torch.zeros_like(answer)], dim=-1).flatten(1, -2)


DISTRIBUTIONS: dict[Compared, Callable[[Tensor], Tensor | None]] = {
    "tokens": lambda answer: answer,
    "classes": lambda answer: answer if answer.dim() == 3 else answer[:, None],
    "labels": _of_labels,
    "spans": lambda answer: answer.transpose(1, 2),  # a distribution over the positions for each end
    "score": lambda answer: None,
    "embeddings": lambda answer: None,
}
"""The logits [rows, places, cells] of the distributions in an answer; None for an answer without probabilities."""
