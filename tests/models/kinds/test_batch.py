"""Batches and examples: sequences of several shapes, selection, digests, and what is cut."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import CalibrationError
from compress.models.kinds.batch import IGNORED, Batch, Examples, joined
from compress.models.kinds.kinds import examples_of

shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=8)


def heard(frames, tokens):
    """A sequence of features with as many labels."""
    labels = torch.arange(tokens)[None]
    return Batch({"input_features": torch.randn(1, 2, frames), "decoder_input_ids": labels + 1}, labels)


@given(shapes=shapes, size=st.integers(1, 4))
def test_batches_hold_sequences_of_one_shape_and_each_once(shapes, size):
    examples = Examples(tuple(heard(*shape) for shape in shapes))
    batches = examples.batches(size)
    assert all(len(batch) <= size for batch in batches)
    rows = [row for batch in batches for row in batch.split()]
    assert sorted(row.content() for row in rows) == sorted(example.content() for example in examples)
    assert all(bool((batch.labels != IGNORED).all()) for batch in batches)
    assert examples.length == max(tokens for _, tokens in shapes) and examples.tokens == sum(t for _, t in shapes)


def test_labels_of_several_lengths_are_padded_in_one_batch():
    examples = Examples((heard(3, 2), heard(3, 1)))
    assert examples.by_shape() == [[0], [1]] and examples.by_shape(labels=False) == [[0, 1]]
    assert examples.batch().labels.tolist() == [[0, 1], [0, IGNORED]]
    assert examples.batch().inputs["decoder_input_ids"].tolist() == [[1, 2], [1, 0]]


def test_inputs_may_have_several_entries_for_each_sequence():
    """As the patches of images, which transformers stacks along the first axis."""
    one, two = (Batch({"input_ids": torch.full((1, 3), i), "pixel_values": torch.full((4, 2), i)}) for i in (1, 2))
    batch = joined([one, two])
    assert len(batch) == 2 and batch.inputs["pixel_values"].shape == (8, 2)
    chosen = batch.select([1])
    assert torch.equal(chosen.inputs["pixel_values"], two.inputs["pixel_values"]) and len(chosen) == 1
    assert [row.content() for row in batch.split()] == [one.content(), two.content()]


def test_texts_are_cut_and_features_are_not():
    text = Examples.of_ids(torch.arange(10).reshape(2, 5))
    assert text.beginning(3).inputs["input_ids"].tolist() == [[0, 1, 2]]
    example = heard(3, 4)
    assert Examples((example,)).beginning(2).content() == example.content()


def test_the_digest_of_token_ids_is_that_of_their_rows():
    ids = torch.arange(12).reshape(3, 4)
    assert Examples.of_ids(ids).sha256() == hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
    assert Examples.of_ids(ids.int()).sha256() == Examples.of_ids(ids).sha256() != Examples.of_ids(ids + 1).sha256()


def test_a_batch_comes_back_from_its_tensors():
    example = heard(3, 2)
    again = Batch.of_tensors({**example.tensors(), "logits": torch.zeros(1)})
    assert again.content() == example.content() and list(again.inputs) == list(example.inputs)
    assert Batch.of_tensors(Examples.of_ids(torch.ones(1, 2).long())[0].tensors()).labels is None


def test_rows_are_chosen_in_any_order():
    examples = Examples.of_ids(torch.arange(6).reshape(3, 2))
    assert [row.inputs["input_ids"].tolist() for row in examples[[2, 0]]] == [[[4, 5]], [[0, 1]]]
    assert len(examples[:2]) == 2 and examples[1].inputs["input_ids"].tolist() == [[2, 3]]


@pytest.mark.parametrize("shape", [(0, 4), (3,), (2, 0)])
def test_no_tokens_are_no_examples(tiny, shape):
    with pytest.raises(CalibrationError, match="holds no tokens"):
        examples_of(tiny("llama"), torch.zeros(*shape, dtype=torch.int64))
