"""Packed codes: exact in both directions for every grid, and a digest that sees every bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.numerics.quant.bits import packed_width
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS, IntGrid


def random_codes(grid="int4", shape=(5, 70), group_size=32, symmetric=True, seed=0, dtype=torch.float32):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return quantize(weight, GRIDS[grid], group_size, symmetric, dtype=dtype)


@settings(max_examples=60)
@given(
    grid=st.sampled_from(list(GRIDS)),
    rows=st.integers(1, 40),
    width=st.integers(1, 70),
    group_size=st.sampled_from(["tensor", "channel", 1, 16, 33]),
    symmetric=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_unpacking_gives_back_the_codes(grid, rows, width, group_size, symmetric, seed):
    kind = GRIDS[grid]
    if kind.block > 1:  # super-blocks take whole columns, in groups of their size
        width, group_size, symmetric = kind.block * (1 + width % 2), kind.group_size, True
    symmetric = not kind.offset and (symmetric or not isinstance(kind, IntGrid))
    codes = random_codes(grid, (rows, width), group_size, symmetric, seed)
    packed = CodesPart.of(codes)
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
    word = int(CodesPart.of(codes).words[0, 0]) & 0xFFFFFFFF
    assert word == (2**grid.bits - 1) << grid.bits  # the lowest code is all zeros, the highest all ones


def test_zero_points_are_held_in_one_byte():
    packed = CodesPart.of(random_codes(symmetric=False))
    assert packed.zero.dtype == torch.int8


@settings(max_examples=60)
@given(
    grid=st.sampled_from(list(GRIDS)),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    group_size=st.sampled_from(["tensor", "channel", 1, 16, 33]),
    symmetric=st.booleans(),
    storage=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_scheme_says_the_shapes_and_dtypes_of_the_tensors(grid, shape, group_size, symmetric, storage):
    kind = GRIDS[grid]
    if kind.block > 1:
        shape, group_size, symmetric = (shape[0], kind.block * (1 + shape[1] % 2)), kind.group_size, True
    symmetric = not kind.offset and (symmetric or kind.symmetric_only)
    part = CodesPart.of(random_codes(grid, shape, group_size, symmetric, dtype=storage)).in_storage(storage)
    specs = CodesScheme(GRIDS[grid], group_size, symmetric).tensors(shape)
    assert CodesScheme(GRIDS[grid], group_size, symmetric) == part.scheme
    tensors = part.tensors()
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {name: spec.shape for name, spec in specs.items()}
    assert all((spec.dtype or storage) == tensors[name].dtype for name, spec in specs.items())
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert part.scheme.size_bytes(shape, storage) == size
    assert CodesScheme(GRIDS[grid], 16, symmetric, True).tensors(shape)["g_idx"].shape == shape[1:]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nf4_dq"])
def test_scales_in_a_byte_stay_so_in_any_storage_dtype(name):
    packed = CodesPart.of(random_codes(name))
    assert packed.scale.dtype == torch.uint8
    assert packed.in_storage(torch.bfloat16) is packed
    assert packed.dtype == torch.float32
    # one product in float32, rounded once
    assert torch.equal(packed.codes().dense(torch.bfloat16), packed.codes().dense().bfloat16())


def test_the_shared_numbers_are_in_the_digest():
    packed = CodesPart.of(random_codes("nvfp4"))
    assert packed.sha256() != packed.changed(shared=packed.shared * 2).sha256()


def test_the_group_index_survives():
    index = torch.tensor([0, 1] * 35, dtype=torch.int32)
    codes = replace(random_codes(), group_index=index)
    assert torch.equal(CodesPart.of(codes).codes().group_index, index)


def test_equal_weights_have_equal_digests_and_any_change_is_seen():
    packed = CodesPart.of(random_codes(symmetric=False))
    assert packed.sha256() == CodesPart.of(random_codes(symmetric=False)).sha256()
    one_code, one_scale, one_zero = packed.words.clone(), packed.scale.clone(), packed.zero.clone()
    one_code[2, 3] ^= 1 << 7
    one_scale[1, 1] = torch.nextafter(one_scale[1, 1], torch.tensor(9.0))
    one_zero[0, 0] += 1
    others = [
        packed.changed(words=one_code),
        packed.changed(scale=one_scale),
        packed.changed(zero=one_zero),
        packed.changed(replace(packed.scheme, symmetric=True), zero=None),
        packed.changed(replace(packed.scheme, group_size=31)),
        packed.changed(replace(packed.scheme, grid=GRIDS["nf4"])),
        packed.changed(replace(packed.scheme, indexed=True), group_index=torch.zeros(70, dtype=torch.int32)),
    ]
    assert len({packed.sha256(), *(other.sha256() for other in others)}) == 1 + len(others)


def test_scales_of_16_bits_have_a_digest_too():
    packed = CodesPart.of(random_codes(dtype=torch.bfloat16))
    half = packed.changed(scale=packed.scale.to(torch.bfloat16))
    assert half.sha256() == half.changed(scale=half.scale.clone()).sha256() != packed.sha256()


def test_scales_of_float16_are_not_rounded_to_bfloat16():
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    part = CodesPart.of(quantize(weight, GRIDS["int4"], 16, dtype=torch.float16)).in_storage(torch.float16)
    assert torch.equal(part.in_storage(torch.bfloat16).scale, part.scale)
    exact = part.with_scale(part.scale.bfloat16().half())
    assert exact.in_storage(torch.bfloat16).scale.dtype == torch.bfloat16
    assert part.in_storage(torch.float32).scale.dtype == torch.float32
