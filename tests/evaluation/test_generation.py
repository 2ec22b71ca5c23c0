"""Greedy answers: agreement, repetition and ends by hand, and a model that loops."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from compress import Evaluate
from compress.errors import NumericError
from compress.evaluation.base import EvaluationContext
from compress.evaluation.generation import PROMPTS, TOKENS, Generation, agreement, repetition
from compress.evaluation.store import Store
from compress.passes.contract.context import Run
from compress.results.measurements.generation import GenerationMeasurement, GenerationResult


def test_agreement_and_repetition_by_hand():
    assert agreement([1, 2, 3], [1, 2, 4, 5]) == 2 and agreement([1, 2], [1, 2, 3]) == 2 and agreement([], [1]) == 0
    assert repetition([1, 2, 3, 4, 5]) == 0 and repetition([1, 2, 3]) == 0
    assert repetition([7] * 8) == pytest.approx(1 - 1 / 5)  # five 4-grams, all of them equal
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 - 4 / 5)


@pytest.fixture
def context(pico):
    return EvaluationContext(Run(), tokenizer=AutoTokenizer.from_pretrained(pico), settings=Evaluate(generation=True))


def test_a_model_that_loops_is_seen(pico_model, context, monkeypatch):
    monkeypatch.setattr("compress.evaluation.generation.PROMPTS", PROMPTS[:2])
    before = Generation().measure(pico_model, context)
    with torch.no_grad():  # the token after each token is itself
        pico_model.lm_head.weight.copy_(pico_model.get_input_embeddings().weight)
        for block in pico_model.model.layers:
            for part in (block.self_attn.o_proj, block.mlp.down_proj):
                part.weight.zero_()
    after = Generation().measure(pico_model, context)
    found = GenerationResult.model_validate(Generation().combine(after, before))
    assert found.repetition[1] > 0.9 and found.ended[1] == 0 and found.agreement < TOKENS
    assert len(GenerationMeasurement.summary(found)) == 3 and found.base[0].prompt == PROMPTS[0]
    same = GenerationResult.model_validate(Generation().combine(before, before))
    assert same.same == 1 and same.agreement == sum(answer.tokens for answer in same.base) / 2


def test_answers_are_kept(pico_model, context, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.evaluation.generation.PROMPTS", PROMPTS[:1])
    kept = EvaluationContext(Run(), tokenizer=context.tokenizer, settings=context.settings, store=Store(tmp_path, "m"))
    first = Generation().measure(pico_model, kept)
    pico_model.generate = None  # a second measurement generates nothing
    assert Generation().measure(pico_model, kept) == first == json.loads(json.dumps(first))


def test_logits_that_are_not_numbers(pico_model, context):
    with torch.no_grad():
        pico_model.lm_head.weight[5] = float("nan")
    with pytest.raises(NumericError, match="logits are NaN on a prompt"):
        Generation().measure(pico_model, context)


def test_models_that_generate_no_text_are_left_out(tiny, context):
    assert Generation().measure(tiny("bert"), context) is None
