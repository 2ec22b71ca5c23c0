"""Codebooks: looked up by hand, read back exactly, of the size that the description says, and damaged ones refused."""

import pytest
import torch
from draws import random
from hypothesis import assume, given
from hypothesis import strategies as st

from compress.layers.base import stored_name
from compress.layers.parts.codebook import CodebookPart, CodebookScheme
from compress.layers.scheme import LayerScheme


def drawn(rows=6, runs=10, bits=3, length=2, count=2, per="tensor", scaled=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, 2**bits, (rows, runs, count), generator=generator)
    books = random(rows if per == "channel" else 1, count, 2**bits, length, seed=seed)
    return CodebookPart.of(indices, books, random(rows, seed=seed) if scaled else None)


def test_by_hand():
    # Two books of runs of two weights: run 0 is entry 1 + entry 0, run 1 is entry 0 + entry 1; row scale 10.
    books = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]], [[0.1, 0.2], [0.3, 0.4]]]])
    part = CodebookPart.of(torch.tensor([[[1, 0], [0, 1]]]), books, torch.tensor([10.0]))
    torch.testing.assert_close(part.dense(torch.float32), torch.tensor([[31.0, 42.0, 13.0, 24.0]]))
    assert part.scheme == CodebookScheme(1, 2, 2, "tensor", True) and part.shape == (1, 4)


@given(
    rows=st.integers(2, 7),
    runs=st.integers(1, 40),
    bits=st.integers(1, 8),
    length=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(1, 3),
    per=st.sampled_from(["tensor", "channel"]),
    scaled=st.booleans(),
)
def test_it_is_read_back_as_it_was_and_is_as_large_as_its_scheme_says(rows, runs, bits, length, count, per, scaled):
    stored = drawn(rows, runs, bits, length, count, per, scaled)
    scheme = LayerScheme(stored.shape, (stored.scheme,))
    assume(scheme.refused is None)
    tensors = {stored_name("weight", name): tensor for name, tensor in stored.tensors().items()}
    assert sum(t.nbytes for t in tensors.values()) == scheme.size_bytes(torch.float32)
    assert LayerScheme.from_json(scheme.to_json()) == scheme and scheme.quantized
    ((found,), ()) = scheme.read(tensors)
    assert found.sha256() == stored.sha256()
    dense = stored.dense(torch.float32)
    assert torch.equal(found.dense(torch.float32), dense)
    ids = torch.tensor([rows - 1, 0, 0])
    assert torch.equal(found.rows_at(ids, torch.float32), dense[ids])
    for row in range(rows):  # each weight, from its indices
        books = stored.books[row if per == "channel" else 0]
        runs_of_row = [sum(books[b, i] for b, i in enumerate(run)) for run in stored.indices[row].tolist()]
        wanted = torch.cat(runs_of_row) * (stored.scale[row] if scaled else 1)
        torch.testing.assert_close(dense[row], wanted)


def test_books_and_scales_are_stored_in_the_storage_dtype():
    part = drawn().in_storage(torch.bfloat16)
    assert part.books.dtype == part.scale.dtype == part.dtype == torch.bfloat16
    assert torch.equal(part.words, drawn().words)


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (CodebookScheme(4, length=8), (64, 60), "runs of 8 weights do not divide its 60 inputs"),
        (CodebookScheme(8), (64, 100), "a codebook of 256 entries is larger than its 100 weights"),
        (CodebookScheme(8, length=8, per="tensor"), (8, 64), "256 entries is larger than its 64 runs of 8 weights"),
    ],
)
def test_layers_that_cannot_have_it(scheme, shape, message):
    assert message in scheme.refuses(shape)
    assert scheme.refuses((4096, 4096)) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 9}, "bits of codebook is 9, but it must be at most 8"),
        ({"bits": 0}, "bits of codebook is 0"),
        ({"bits": 4, "per": "row"}, "per of codebook is 'row'"),
        ({"bits": 4, "length": -1}, "length of codebook is -1"),
    ],
)
def test_descriptions_that_describe_nothing(values, message):
    described = {"shape": [8, 8], "parts": [{"kind": "codebook", **values}]}
    with pytest.raises(ValueError, match=message):
        LayerScheme.from_json(described)


def test_damaged_tensors_are_errors():
    part = drawn()
    scheme = LayerScheme(part.shape, (part.scheme,))
    tensors = {stored_name("weight", name): tensor for name, tensor in part.tensors().items()}
    with pytest.raises(KeyError, match="weight_books"):
        scheme.read({n: t for n, t in tensors.items() if n != "weight_books"})
    with pytest.raises(ValueError, match="weight_codes is"):
        scheme.read(tensors | {"weight_codes": tensors["weight_codes"][:, :-1]})
    with pytest.raises(ValueError, match="weight_books holds a number that is not finite"):
        scheme.read(tensors | {"weight_books": part.books * torch.nan})
