"""Codes of kept weights alone: the same codes, the same mask, the same weight, for every grid."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from masks import WITH_ZERO, random_mask, regular_mask

from compress.layers.parts import codes as packed_codes
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.sparse import SparsePart, SparseScheme
from compress.numerics.quant.bits import unpack
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.super_blocks import SuperBlock
from compress.numerics.sparse import positions as sparse
from compress.numerics.sparse.positions import PackedMask, SparseLayout


def pruned(mask, grid, group_size, symmetric, seed=0, dtype=torch.float32):
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    return CodesPart.of(quantize(weight, GRIDS[grid], group_size, symmetric, mask=mask, dtype=dtype))


@settings(max_examples=60)
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
def testkept_codes_come_back_bit_for_bit(
    grid, shape, n_of_m, density, group_size, symmetric, indexed, empty_row, part, seed
):
    if isinstance(GRIDS[grid].scaling, SuperBlock):
        group_size, shape = GRIDS[grid].group_size, (shape[0], 256)
    assume(n_of_m is None or n_of_m[0] < n_of_m[1] <= shape[1])
    mask = random_mask(*shape, density, seed) if n_of_m is None else regular_mask(*shape, *n_of_m, seed)
    if empty_row and n_of_m is None:
        mask[-1] = False
    whole = pruned(mask, grid, group_size, symmetric or GRIDS[grid].symmetric_only, seed)
    if indexed and isinstance(group_size, int):
        index = torch.randint(whole.scale.shape[1], shape[1:], dtype=torch.int32)
        whole = whole.changed(replace(whole.scheme, indexed=True), group_index=index)
        mask &= whole.dense(torch.float32) != 0  # zero points are those of other columns now
        assume(n_of_m is None)
    with patch.object(sparse, "PART", part), patch.object(packed_codes, "PART", part):
        only = SparsePart.of(whole, PackedMask.of(mask, n_of_m))
        assert torch.equal(only.kept.mask(), mask)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(only.dense(dtype), whole.dense(dtype).masked_fill(~mask, 0))
        kept = torch.cat([only.values.kept_codes(part) for part in only.kept.parts()])
        unsigned = unpack(whole.words, whole.grid.bits, shape[1])
        assert torch.equal(kept.long(), unsigned[mask].long())
    scheme = SparseScheme(only.kept.sparsity, whole.scheme)
    assert only.scheme == scheme
    tensors, specs = only.tensors(), scheme.tensors(shape)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {name: spec.shape for name, spec in specs.items()}
    assert all((spec.dtype or torch.float32) == tensors[name].dtype for name, spec in specs.items())
    size = sum(t.numel() * 4 for t in (only.values.words, only.positions))
    assert size == only.kept.sparsity.size_bytes(shape, GRIDS[grid].bits)
    assert scheme.size_bytes(shape, torch.float32) == sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("grid", WITH_ZERO)
def test_a_weight_that_was_rounded_under_its_mask_is_the_same(grid):
    mask = regular_mask(6, 64, 2, 4)
    whole = pruned(mask, grid, GRIDS[grid].group_size or 16, True)
    only = SparsePart.of(whole, PackedMask.of(mask, (2, 4)))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(only.dense(dtype), whole.dense(dtype))


def test_two_of_four_in_int4_takes_three_bits():
    mask = regular_mask(8, 128, 2, 4)
    only = SparsePart.of(pruned(mask, "int4", 64, True), PackedMask.of(mask, (2, 4)))
    assert only.values.words.shape == (8, 8) and only.positions.shape == (
        8,
        4,
    )  # 64 codes of 4 bits, 64 indexes of 2 per row
    stream = SparsePart.of(pruned(mask, "int4", 64, True), PackedMask.of(mask))
    assert stream.values.words.shape == (64,) and stream.positions.shape == (8, 4)


def test_the_digest_sees_the_mask():
    mask = regular_mask(4, 16, 2, 4)
    whole = pruned(mask, "int8", 8, True)
    found = {
        whole.sha256(),
        SparsePart.of(whole, PackedMask.of(mask)).sha256(),
        SparsePart.of(whole, PackedMask.of(mask, (2, 4))).sha256(),
    }
    assert len(found) == 3
    wider = mask.clone()
    wider[0] = True  # the same weight, with zeros that count as kept
    assert SparsePart.of(whole, PackedMask.of(wider)).sha256() not in found


def test_sparsities_have_names():
    for sparsity in (SparseLayout(7), SparseLayout(8, (2, 4)), SparseLayout(30, (3, 200))):
        assert SparseLayout.named(sparsity.text, sparsity.kept) == sparsity
