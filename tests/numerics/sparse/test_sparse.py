"""Kept weights alone: positions and values come back bit for bit, sizes are those of the tensors, damage is seen."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import random_mask, regular_mask

from compress.layers.parts.dense import DensePart, DenseScheme
from compress.layers.parts.sparse import SparsePart, SparseScheme
from compress.numerics.quant.bits import unpack
from compress.numerics.sparse import positions as sparse
from compress.numerics.sparse.positions import PackedMask, SparseLayout, choose, index_bits, is_regular, sparsities

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def weight_of(mask, dtype=torch.float32, seed=0):
    """Random where kept, with zeros of both signs among them, and zero elsewhere."""
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight[:, ::5] = 0.0
    weight[:, 1::7] = -0.0
    return torch.where(mask, weight, torch.zeros((), dtype=dtype))


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def size_of(weight):
    return sum(t.numel() * t.element_size() for t in weight.tensors().values())


shapes = st.tuples(st.integers(1, 20), st.integers(1, 150))
parts = st.sampled_from([1, 40, 1 << 20])


# ---- by hand ----


def test_two_of_four_by_hand():
    mask = torch.tensor([[0, 1, 0, 1, 1, 1, 0, 0, 1]]).bool()
    remaining = PackedMask.of(mask, (2, 4))
    assert remaining.sparsity == SparseLayout(5, (2, 4)) and remaining.sparsity.text == "2:4"
    assert remaining.words.tolist() == [
        [0b01_00_11_01]
    ]  # columns 1, 3 of the first group, 0, 1 of the second, low bits first
    actual = SparsePart.of(DensePart.of(torch.tensor([[0.0, 5, 0, 6, 7, 8, 0, 0, 9]])), remaining)
    assert actual.values.weight.tolist() == [[5, 6, 7, 8, 9]]
    assert actual.dense(torch.float32).tolist() == [[0, 5, 0, 6, 7, 8, 0, 0, 9]]


def test_a_bitmask_by_hand():
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]]).bool()
    remaining = PackedMask.of(mask)
    assert (remaining.sparsity, remaining.sparsity.text) == (SparseLayout(4), "bitmask")
    assert remaining.words.tolist() == [[0b1010], [0], [0b0011]]
    actual = SparsePart.of(DensePart.of(torch.tensor([[0.0, 1, 0, 0], [0, 0, 0, 0], [3, 4, 0, 0]])), remaining)
    assert actual.values.weight.tolist() == [1, 0, 3, 4]  # a kept zero is a value like others


@pytest.mark.parametrize(("m", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (16, 4), (17, 5), (256, 8)])
def test_the_bits_of_an_index(m, bits):
    assert index_bits(m) == bits == math.ceil(math.log2(m))


def test_what_a_weight_costs():
    shape = (64, 512)
    assert SparseLayout.regular(shape, 2, 4).size_bytes(shape, torch.bfloat16) * 8 / (64 * 512) == 9  # 8 + 1
    assert SparseLayout.regular(shape, 2, 4).size_bytes(shape, 4) * 8 / (64 * 512) == 3  # 2 + 1
    assert SparseLayout.regular(shape, 1, 4).size_bytes(shape, 4) * 8 / (64 * 512) == 1.5  # 1 + 1/2
    assert SparseLayout(64 * 512 // 4).size_bytes(shape, 8) * 8 / (64 * 512) == 3  # 2 + 1


# ---- round trips ----


@st.composite
def regular(draw, largest=256):
    """(shape, n, m) of which n of every m columns can be kept."""
    rows, width = draw(shapes.filter(lambda shape: shape[1] > 1))
    m = draw(st.integers(2, min(width, largest)))
    return (rows, width), draw(st.integers(1, m - 1)), m


@settings(max_examples=60)
@given(regular(), st.sampled_from(FLOATS), parts, st.integers(0, 99))
def test_n_of_m_comes_back_bit_for_bit(drawn, dtype, part, seed):
    shape, n, m = drawn
    mask = regular_mask(*shape, n, m, seed)
    with patch.object(sparse, "PART", part):
        assert is_regular(mask, n, m)
        remaining = PackedMask.of(mask, (n, m))
        assert remaining.sparsity == SparseLayout.regular(shape, n, m)
        assert torch.equal(remaining.mask(), mask)
        weight = weight_of(mask, dtype, seed)
        actual = SparsePart.of(DensePart.of(weight), remaining)
        assert same_bits(actual.dense(dtype), weight)
        remaining.check("weight_kept")
    assert actual.values.weight.shape == (shape[0], shape[1] // m * n + shape[1] % m)
    assert remaining.words.shape[1] == math.ceil(shape[1] // m * n * index_bits(m) / 32)
    assert size_of(actual) == remaining.sparsity.size_bytes(shape, dtype)


@settings(max_examples=60)
@given(shapes, st.floats(0, 1), st.sampled_from(FLOATS), parts, st.booleans(), st.integers(0, 99))
def test_any_mask_comes_back_bit_for_bit(shape, density, dtype, part, empty_row, seed):
    mask = random_mask(*shape, density, seed)
    mask[0] &= not empty_row
    with patch.object(sparse, "PART", part):
        remaining = PackedMask.of(mask)
        assert torch.equal(remaining.mask(), mask)
        weight = weight_of(mask, dtype, seed)
        actual = SparsePart.of(DensePart.of(weight), remaining)
        assert same_bits(actual.dense(dtype), weight)
        remaining.check("weight_kept")
    assert actual.values.weight.shape == (int(mask.sum()),)
    assert size_of(actual) == remaining.sparsity.size_bytes(shape, dtype)


@settings(max_examples=60)
@given(shapes, st.floats(0, 1), st.sampled_from(FLOATS), st.integers(0, 99))
def test_the_scheme_says_the_shapes_and_dtypes_of_the_tensors(shape, density, dtype, seed):
    mask = random_mask(*shape, density, seed)
    for sparsity in sparsities(mask):
        actual = SparsePart.of(DensePart.of(weight_of(mask, dtype)), PackedMask.of(mask, sparsity.n_of_m))
        specs = SparseScheme(sparsity, DenseScheme()).tensors(shape)
        tensors = {name: (tuple(t.shape), t.dtype) for name, t in actual.tensors().items()}
        assert tensors == {name: (spec.shape, spec.dtype or dtype) for name, spec in specs.items()}
        assert size_of(actual) == actual.scheme.size_bytes(shape, dtype)


def test_the_dense_weight_in_another_dtype():
    mask = regular_mask(3, 8, 2, 4)
    actual = SparsePart.of(DensePart.of(weight_of(mask, torch.bfloat16)), PackedMask.of(mask, (2, 4)))
    assert torch.equal(actual.dense(torch.float32), weight_of(mask, torch.bfloat16).float())
    assert actual.dense(torch.bfloat16).dtype == actual.dtype == torch.bfloat16


# ---- which way to store a mask ----


@settings(max_examples=50)
@given(regular(40), st.integers(0, 99))
def test_a_regular_mask_is_found_out(drawn, seed):
    shape, n, m = drawn
    actual = sparsities(regular_mask(*shape, n, m, seed))
    by_index, bitmask = SparseLayout.regular(shape, n, m), SparseLayout.regular(shape, n, m).kept
    assert actual[-1] == SparseLayout(bitmask)
    if by_index.words(shape[1]) <= actual[-1].words(shape[1]):
        assert by_index in actual
    for value in (torch.bfloat16, 4):  # the one that is left out would not have been chosen
        best = choose(actual, shape, value, "always")
        assert best.size_bytes(shape, value) <= by_index.size_bytes(shape, value)


def test_one_weight_more_or_less_in_any_group_is_no_pattern():
    mask = regular_mask(6, 32, 2, 4)
    for at in ((0, 0), (5, 31), (3, 17)):
        alternative = mask.clone()
        alternative[at] ^= True
        assert not is_regular(alternative, 2, 4)
        assert [s.text for s in sparsities(alternative) if s.n_of_m == (2, 4)] == []


def test_a_tail_that_is_not_kept_is_no_pattern():
    mask = regular_mask(6, 34, 2, 4)
    assert is_regular(mask, 2, 4)
    mask[2, 33] = False
    assert not is_regular(mask, 2, 4)


def test_n_of_m_is_preferred_where_both_cost_the_same():
    mask = regular_mask(4, 64, 2, 4)
    assert choose(sparsities(mask), (4, 64), torch.float32, "auto") == SparseLayout(128, (2, 4))


@pytest.mark.parametrize(
    ("density", "value", "policy", "stored"),
    [
        (0.5, 4, "auto", True),  # 2 + 1 bits instead of 4
        (0.5, 2, "auto", True),  # 1 + 1 bits instead of 2: no larger, and the mask is kept
        (0.75, 2, "auto", False),
        (0.75, 2, "always", True),
        (0.9, 4, "auto", False),
        (0.9, torch.bfloat16, "auto", True),
        (0.97, torch.bfloat16, "auto", False),
        (0.5, 4, "off", False),
    ],
)
def test_positions_must_pay(density, value, policy, stored):
    shape = (100, 320)
    actual = choose([SparseLayout(round(density * 32000))], shape, value, policy)
    assert (actual is not None) == stored


# ---- digests and damage ----


def test_the_digest_sees_values_and_positions():
    mask = regular_mask(4, 16, 2, 4)
    single = SparsePart.of(DensePart.of(weight_of(mask, torch.bfloat16)), PackedMask.of(mask, (2, 4)))
    equal = SparsePart.of(DensePart.of(weight_of(mask, torch.bfloat16)), PackedMask.of(mask, (2, 4)))
    assert single.sha256() == equal.sha256()
    values, words = single.values.weight.clone(), single.positions.clone()
    values[1, 2], words[0, 0] = 9, words[0, 0] ^ 1
    alternatives = [
        single.with_values(DensePart(DenseScheme(), single.shape, {"weight": values})),
        SparsePart(single.scheme, single.shape, {"positions": words}, single.values),
        SparsePart.of(DensePart.of(single.dense(torch.bfloat16)), PackedMask.of(mask)),
    ]
    assert len({single.sha256(), *(alternative.sha256() for alternative in alternatives)}) == 4


def test_positions_that_cannot_be_are_named():
    mask = regular_mask(4, 40, 2, 4)
    two = PackedMask.of(mask, (2, 4))
    assert unpack(two.words, 2, 20)[0, 0] < unpack(two.words, 2, 20)[0, 1]
    equal = two.words.clone()
    equal[3, 0] = 0  # the same column twice
    with pytest.raises(ValueError, match="weight_kept holds indexes that are not 2 different ones below 4, ascending"):
        replace(two, words=equal).check("weight_kept")
    three = PackedMask.of(regular_mask(4, 40, 1, 3), (1, 3))
    with pytest.raises(ValueError, match="not 1 different ones below 3"):
        replace(three, words=torch.full_like(three.words, -1)).check("weight_kept")  # column 3 of 3
    bits = PackedMask.of(mask)
    fewer = bits.words.clone()
    fewer[2, 0] = 0
    with pytest.raises(ValueError, match=r"weight_kept marks \d\d weights as kept, but there are 80"):
        replace(bits, words=fewer).check("weight_kept")
    beyond = bits.words.clone()
    beyond[0, 1] |= 1 << 20  # column 52 of 40
    with pytest.raises(ValueError, match="weight_kept marks columns after the last of 40"):
        replace(bits, words=beyond).check("weight_kept")
