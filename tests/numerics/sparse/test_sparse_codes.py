"""Codes of kept weights alone: the same codes, the same mask, the same weight, for every grid."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from masks import WITH_ZERO, random_mask, regular_mask

from compress.kernels import reference
from compress.numerics.quant import packed as packed_codes
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.packed import PackedCodes
from compress.numerics.sparse import positions as sparse
from compress.numerics.sparse.positions import Kept, Sparsity

TENSORS = ("words", "scale", "zero", "group_index", "shared")


def pruned(mask, grid, group_size, symmetric, seed=0, dtype=torch.float32):
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    return PackedCodes.of(quantize(weight, GRIDS[grid], group_size, symmetric, mask=mask, dtype=dtype))


@settings(deadline=None, max_examples=60)
@given(
    grid=st.sampled_from(WITH_ZERO),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 120)),
    n_of_m=st.none() | st.tuples(st.integers(1, 15), st.integers(2, 16)),
    density=st.floats(0, 1),
    group_size=st.sampled_from(["tensor", "channel", 1, 16, 33]),
    symmetric=st.booleans(),
    indexed=st.booleans(),
    empty_row=st.booleans(),
    part=st.sampled_from([32, 64, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_kept_codes_come_back_bit_for_bit(
    grid, shape, n_of_m, density, group_size, symmetric, indexed, empty_row, part, seed
):
    assume(n_of_m is None or n_of_m[0] < n_of_m[1] <= shape[1])
    mask = random_mask(*shape, density, seed) if n_of_m is None else regular_mask(*shape, *n_of_m, seed)
    if empty_row and n_of_m is None:
        mask[-1] = False
    whole = pruned(mask, grid, group_size, symmetric or GRIDS[grid].symmetric_only, seed)
    if indexed and isinstance(group_size, int):
        whole = replace(whole, group_index=torch.randint(whole.scale.shape[1], shape[1:], dtype=torch.int32))
        mask &= reference.dense_weight(whole, torch.float32) != 0  # zero points are those of other columns now
        assume(n_of_m is None)
        whole = replace(whole, words=PackedCodes.of(replace(whole.codes(), codes=_masked(whole, mask))).words)
    with patch.object(sparse, "PART", part), patch.object(packed_codes, "PART", part):
        only = whole.only(Kept.of(mask, n_of_m))
        assert torch.equal(only.kept.mask(), mask)
        back, codes = only.codes(), whole.codes()
        assert torch.equal(back.codes[mask], codes.codes[mask]) and back.codes.dtype == codes.codes.dtype
        assert not bool(back.dense()[~mask].any())
        for dtype in (torch.float32, torch.bfloat16):
            masked = reference.dense_weight(whole, dtype) * mask
            assert torch.equal(reference.dense_weight(only, dtype), masked)
    empty = PackedCodes.empty(
        GRIDS[grid], group_size, shape, whole.zero is None, whole.group_index is not None, torch.float32,
        only.kept.sparsity,
    )  # fmt: skip
    for name in TENSORS:
        real, counted = getattr(only, name), getattr(empty, name)
        assert (real is None) == (counted is None)
        assert real is None or (real.shape, real.dtype) == (counted.shape, counted.dtype)
    size = sum(t.numel() * 4 for t in (only.words, only.kept.words))
    assert size == only.kept.sparsity.size_bytes(shape, GRIDS[grid].bits)


def _masked(packed, mask):
    """The codes with those of zero where nothing is kept."""
    only = packed.only(Kept.of(mask))
    return only.codes().codes


@pytest.mark.parametrize("grid", WITH_ZERO)
def test_a_weight_that_was_rounded_under_its_mask_is_the_same_to_the_last_bit(grid):
    """The codes of zero that are put back are those that rounding gave."""
    mask = regular_mask(6, 64, 2, 4)
    whole = pruned(mask, grid, GRIDS[grid].group_size or 16, True)
    codes = whole.only(Kept.of(mask, (2, 4))).codes()
    if "fp4" in grid or "fp8" in grid:  # these have two zeros; pruning may have left the negative one
        assert torch.equal(codes.dense(), whole.codes().dense())
    else:
        assert PackedCodes.of(codes).sha256() == whole.sha256()


def test_two_of_four_in_int4_takes_three_bits():
    mask = regular_mask(8, 128, 2, 4)
    only = pruned(mask, "int4", 64, True).only(Kept.of(mask, (2, 4)))
    assert only.words.shape == (8, 8) and only.kept.words.shape == (8, 4)  # 64 codes of 4 bits, 64 indexes of 2 per row
    stream = pruned(mask, "int4", 64, True).only(Kept.of(mask))
    assert stream.words.shape == (64,) and stream.kept.words.shape == (8, 4)


def test_the_digest_sees_the_mask():
    mask = regular_mask(4, 16, 2, 4)
    whole = pruned(mask, "int8", 8, True)
    found = {whole.sha256(), whole.only(Kept.of(mask)).sha256(), whole.only(Kept.of(mask, (2, 4))).sha256()}
    assert len(found) == 3
    wider = mask.clone()
    wider[0] = True  # the same weight, with zeros that count as kept
    assert whole.only(Kept.of(wider)).sha256() not in found


def test_sparsities_have_names():
    for sparsity in (Sparsity(7), Sparsity(8, (2, 4)), Sparsity(30, (3, 200))):
        assert Sparsity.named(sparsity.text, sparsity.kept) == sparsity
