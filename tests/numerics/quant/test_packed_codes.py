"""Packed codes: exact in both directions for every grid, and a digest that sees every bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.numerics.quant.bits import packed_width
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS, IntGrid
from compress.numerics.quant.packed import PackedCodes


def random_codes(grid="int4", shape=(5, 70), group_size=32, symmetric=True, seed=0, dtype=torch.float32):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return quantize(weight, GRIDS[grid], group_size, symmetric, dtype=dtype)


@settings(deadline=None, max_examples=60)
@given(
    grid=st.sampled_from(list(GRIDS)),
    rows=st.integers(1, 40),
    width=st.integers(1, 70),
    group_size=st.sampled_from(["tensor", "channel", 1, 16, 33]),
    symmetric=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_unpacking_gives_back_the_codes(grid, rows, width, group_size, symmetric, seed):
    symmetric = symmetric or not isinstance(GRIDS[grid], IntGrid)
    codes = random_codes(grid, (rows, width), group_size, symmetric, seed)
    packed = PackedCodes.of(codes)
    assert packed.words.shape == (rows, packed_width(width, codes.grid.bits))
    back = packed.codes()
    assert torch.equal(back.codes, codes.codes)
    assert back.codes.dtype == codes.codes.dtype
    assert torch.equal(back.scale, codes.scale)
    assert (back.shared is None) == (codes.shared is None)
    assert back.shared is None or torch.equal(back.shared, codes.shared)
    assert (back.zero is None) if symmetric else torch.equal(back.zero, codes.zero)
    assert (back.grid, back.group_size, back.shape) == (codes.grid, codes.group_size, codes.shape)
    assert torch.equal(back.dense(), codes.dense())


@pytest.mark.parametrize("name", [name for name in GRIDS if name.startswith("int")])
def test_integers_are_stored_from_zero_up(name):
    grid = GRIDS[name]
    codes = replace(random_codes(name, (1, 2)), codes=torch.tensor([[grid.lowest, grid.highest]], dtype=torch.int8))
    word = int(PackedCodes.of(codes).words[0, 0]) & 0xFFFFFFFF
    assert word == (2**grid.bits - 1) << grid.bits  # the lowest code is all zeros, the highest all ones


def test_zero_points_are_held_in_one_byte():
    packed = PackedCodes.of(random_codes(symmetric=False))
    assert packed.zero.dtype == torch.int8


@settings(deadline=None, max_examples=60)
@given(
    grid=st.sampled_from(list(GRIDS)),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    group_size=st.sampled_from(["tensor", "channel", 1, 16, 33]),
    symmetric=st.booleans(),
    storage=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_empty_codes_have_the_shapes_and_dtypes_of_real_ones(grid, shape, group_size, symmetric, storage):
    symmetric = symmetric or GRIDS[grid].symmetric_only
    packed = PackedCodes.of(random_codes(grid, shape, group_size, symmetric, dtype=storage)).in_storage(storage)
    empty = PackedCodes.empty(GRIDS[grid], group_size, shape, symmetric, False, storage)
    for name in ("words", "scale", "zero", "group_index", "shared"):
        real, counted = getattr(packed, name), getattr(empty, name)
        assert (real is None) == (counted is None)
        assert real is None or (real.shape, real.dtype) == (counted.shape, counted.dtype)
    assert PackedCodes.empty(GRIDS[grid], 16, shape, symmetric, True, storage).group_index.shape == shape[1:]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nf4_dq"])
def test_scales_in_a_byte_stay_so_in_any_storage_dtype(name):
    packed = PackedCodes.of(random_codes(name))
    assert packed.scale.dtype == torch.uint8
    assert packed.in_storage(torch.bfloat16) is packed
    assert packed.dtype == torch.float32
    # one product in float32, rounded once
    assert torch.equal(packed.codes().dense(torch.bfloat16), packed.codes().dense().bfloat16())


def test_the_shared_numbers_are_in_the_digest():
    packed = PackedCodes.of(random_codes("nvfp4"))
    assert packed.sha256() != replace(packed, shared=packed.shared * 2).sha256()


def test_the_group_index_survives():
    index = torch.tensor([0, 1] * 35, dtype=torch.int32)
    codes = replace(random_codes(), group_index=index)
    assert torch.equal(PackedCodes.of(codes).codes().group_index, index)


def test_equal_weights_have_equal_digests_and_any_change_is_seen():
    packed = PackedCodes.of(random_codes(symmetric=False))
    assert packed.sha256() == PackedCodes.of(random_codes(symmetric=False)).sha256()
    one_code, one_scale, one_zero = packed.words.clone(), packed.scale.clone(), packed.zero.clone()
    one_code[2, 3] ^= 1 << 7
    one_scale[1, 1] = torch.nextafter(one_scale[1, 1], torch.tensor(9.0))
    one_zero[0, 0] += 1
    others = [
        replace(packed, words=one_code),
        replace(packed, scale=one_scale),
        replace(packed, zero=one_zero),
        replace(packed, zero=None),
        replace(packed, group_size=31),
        replace(packed, grid=GRIDS["nf4"]),
        replace(packed, group_index=torch.zeros(70, dtype=torch.int32)),
    ]
    assert len({packed.sha256(), *(other.sha256() for other in others)}) == 1 + len(others)


def test_scales_of_16_bits_have_a_digest_too():
    packed = PackedCodes.of(random_codes(dtype=torch.bfloat16))
    half = replace(packed, scale=packed.scale.to(torch.bfloat16))
    assert half.sha256() == replace(half, scale=half.scale.clone()).sha256() != packed.sha256()
