"""The arguments of decoding steps: those that transformers makes, made by it twice per text."""

import pickle
from typing import Any

import pytest
import torch
from model_families import FAMILIES, VOCAB

from compress.decode.acceleration import compile_generation
from compress.decode.arguments import StepArguments, equal_arguments
from compress.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no C++ library")
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
TOKENS = 24
"""More than the windows of the tiny models."""


class Checked(StepArguments):
    """Compares what it returns with what transformers makes, and counts what is left to that."""

    def __init__(self, model):
        super().__init__(model)
        self.steps, self.left = 0, 0

    def __call__(self, ids, given):
        left = self.left
        found = super().__call__(ids, given)
        if given["next_sequence_length"] == 1:
            self.steps += 1
            assert equal_arguments(found, super().prepare_with_transformers(ids, given))
        else:
            self.left = left
        return found

    def prepare_with_transformers(self, ids, given):
        self.left += 1
        return super().prepare_with_transformers(ids, given)


def checked(model) -> Checked:
    """The arguments of a model that generates by traced steps."""
    compile_generation(model)
    generation = model.prepare_inputs_for_generation.__self__
    generation.arguments = Checked(model)
    return generation.arguments


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, padded, tiny):
    model = tiny(family)
    if not model.can_generate() or model.config.is_encoder_decoder:
        return
    ids, mask = torch.arange(2, 14).view(2, 6) % VOCAB, torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = int(not padded)  # a shorter text, padded on the left
    checked(model)
    with torch.no_grad():
        model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, **GREEDY)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_two_steps_of_a_text_are_left_to_transformers(family, tiny):
    model = tiny(family)
    found = checked(model)
    with torch.no_grad():
        for text in (torch.arange(2, 8)[None], torch.arange(3, 12)[None]):
            found.steps = found.left = 0
            model.generate(text, max_new_tokens=TOKENS, **GREEDY)
            assert (found.steps, found.left) == (TOKENS - 1, 2)


def test_two_steps_behind_a_window_are_left_to_transformers(tiny):
    model = tiny("gemma3", sliding_window=10)
    found = checked(model)
    with torch.no_grad():
        model.generate(torch.arange(2, 8)[None], max_new_tokens=TOKENS, **GREEDY)
    assert (found.steps, found.left) == (TOKENS - 1, 4)


def test_texts_in_turns_and_other_calls(tiny):
    model = tiny("llama")
    found = checked(model)
    ids = torch.arange(2, 8)[None]
    embeddings = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        model.generate(ids, max_new_tokens=6, **GREEDY)
        model.generate(inputs_embeds=embeddings, max_new_tokens=6, **GREEDY)
        assert found.previous is None
        model.generate(ids, max_new_tokens=6, output_scores=True, return_dict_in_generate=True, **GREEDY)


def test_a_copy_knows_no_text(tiny):
    model = tiny("llama")
    arguments = StepArguments(model)
    arguments.previous = object()  # type: ignore[assignment]
    assert pickle.loads(pickle.dumps(arguments)).previous is None
