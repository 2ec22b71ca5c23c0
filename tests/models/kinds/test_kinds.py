"""Kinds of models: told by the auto classes of transformers, and by the fields of an output."""

import pytest
import torch
import transformers
from headless import KINDS, SIZES, headless
from transformers.modeling_outputs import (
    BaseModelOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)

from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.contract import DISTRIBUTIONS, answer_of
from compress.models.kinds.kinds import described, is_headless, kind_of
from compress.models.kinds.masked import MaskedLM

WANTED = {
    "encoder": ("is an encoder", "AutoModel", "embeddings"),
    "sentence encoder": ("is an encoder", "AutoModel", "embeddings"),
    "decoder without a head": ("is an encoder", "AutoModel", "embeddings"),
    "classes": ("is a sequence classifier", "AutoModelForSequenceClassification", "classes"),
    "labels": ("is a sequence classifier", "AutoModelForSequenceClassification", "labels"),
    "score": ("is a sequence classifier", "AutoModelForSequenceClassification", "score"),
    "tokens": ("is a token classifier", "AutoModelForTokenClassification", "classes"),
    "spans": ("is a question answering model", "AutoModelForQuestionAnswering", "spans"),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_model_without_a_head(name):
    model = headless(name)
    kind = kind_of(model)
    assert (kind.name, kind.auto, kind.compared_in(model.config)) == WANTED[name]
    assert is_headless(model) and described(model) == f"{KINDS[name][0]} {kind.name}"
    assert type(getattr(transformers, kind.auto).from_config(model.config)) is type(model)


def test_models_with_a_head_are_language_models(tiny):
    assert kind_of(tiny("llama")) is CAUSAL and kind_of(tiny("bert")) == MaskedLM()
    assert not is_headless(tiny("llama")) and not is_headless(torch.nn.Linear(1, 1))
    assert kind_of(torch.nn.Linear(1, 1)) is CAUSAL


def test_other_models_are_of_no_kind():
    model = transformers.BertForMultipleChoice(transformers.BertConfig(**SIZES))
    assert kind_of(model) is None and described(model) == "BertForMultipleChoice is of no supported kind"


def test_the_answer_is_told_by_the_fields_of_an_output():
    logits, start, end, states = (torch.randn(2, 3) for _ in range(4))
    assert answer_of(SequenceClassifierOutput(logits=logits)) is logits
    both = answer_of(QuestionAnsweringModelOutput(start_logits=start, end_logits=end))
    assert torch.equal(both[..., 0], start) and torch.equal(both[..., 1], end)
    assert answer_of(BaseModelOutput(last_hidden_state=states)) is states
    assert answer_of(Seq2SeqModelOutput()) is None


def test_the_distributions_of_an_answer():
    classes, labels, tokens, ends = torch.randn(2, 5), torch.randn(2, 3), torch.randn(2, 7, 4), torch.randn(2, 7, 2)
    assert torch.equal(DISTRIBUTIONS["classes"](classes), classes[:, None])
    assert torch.equal(DISTRIBUTIONS["classes"](tokens), tokens)
    of_labels = DISTRIBUTIONS["labels"](labels).softmax(-1)
    assert of_labels.shape == (2, 3, 2)
    torch.testing.assert_close(of_labels[..., 0], labels.sigmoid())
    spans = DISTRIBUTIONS["spans"](ends)
    assert spans.shape == (2, 2, 7) and torch.equal(spans[:, 1], ends[..., 1])
    assert DISTRIBUTIONS["embeddings"](tokens) is None and DISTRIBUTIONS["score"](classes) is None
