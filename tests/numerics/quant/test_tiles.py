"""Scales of tiles: by hand, exact to the file and back, the bits that they take, and better than plain scales."""

import pytest
import torch
from draws import random
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.numerics.quant.codes import fit_shared, quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.tiles import TileScale

TILES = [name for name, grid in GRIDS.items() if isinstance(grid.scaling, TileScale)]


def test_by_hand():
    # two tiles of two rows; scales of 1 bit are the ends of a tile: the least and the largest
    kind = TileScale(rows=2, bits=1)
    scale, minimum = torch.tensor([[1.0], [3.0], [8.0], [8.0]]), torch.tensor([[-4.0], [0.0], [-2.0], [-2.0]])
    shared = kind.shared_of(scale, minimum)
    least, step, low, low_step = shared.view(4, 2).tolist()
    assert (least, low) == ([1.0, 8.0], [0.0, 2.0]) and (step[0], low_step[0]) == (2.0, 4.0)
    assert kind.round(scale, 1.0, torch.float32, shared).flatten().tolist() == [1, 3, 8, 8]
    near = torch.tensor([[1.9], [2.1], [7.0], [9.0]])  # half-way is 2
    assert kind.round(near, 1.0, torch.float32, shared).flatten()[:3].tolist() == [1, 3, 8]
    assert kind.encode(scale, shared)[:, 0].tolist() == [0, 1, 0, 0]
    assert kind.round_minimum(torch.tensor([[-3.0], [-1.0], [-9.0], [0.0]]), torch.float32, shared)[
        :2
    ].flatten().tolist() == [-4, 0]
    assert kind.encode_minimum(minimum, shared)[:, 0].tolist() == [1, 0, 0, 0]


@settings(max_examples=60)
@given(rows=st.integers(1, 40), groups=st.integers(1, 13), bits=st.integers(1, 5), seed=st.integers(0, 99))
def test_scales_and_minima_are_exact_to_the_file_and_back(rows, groups, bits, seed):
    kind = TileScale(bits=bits)
    scale, minimum = random(rows, groups, seed=seed).exp() / 30, -random(rows, groups, seed=seed + 1).abs()
    shared = kind.shared_of(scale, minimum)
    assert shared.numel() == kind.shared_count(rows, groups) and torch.equal(shared.half().float(), shared)
    scale, minimum = kind.round(scale, 1, torch.float32, shared), kind.round_minimum(minimum, torch.float32, shared)
    assert (scale > 0).all() and (minimum <= 0).all()
    for stored, decode, expected in (
        (kind.encode(scale, shared), kind.decode, scale),
        (kind.encode_minimum(minimum, shared), kind.decode_minimum, minimum),
    ):
        assert stored.shape == (rows, kind.stored_width(groups)) and stored.dtype == kind.stored
        assert torch.equal(decode(stored, shared.half()), expected)
    for group in range(groups):
        part = kind.part(shared, rows, groups, group)
        assert torch.equal(kind.round(scale[:, group : group + 1], 1, torch.float32, part)[:, 0], scale[:, group])


@pytest.mark.parametrize("name", TILES)
def test_a_part_is_as_large_as_its_scheme_says_and_decodes_to_the_codes(name):
    weight = random(40, 96)
    codes = quantize(weight, GRIDS[name], 16, False, "mse")
    part = CodesPart.of(codes)
    assert part.scheme == CodesScheme(GRIDS[name], 16, False)
    tensors = part.tensors()
    assert sum(t.nbytes for t in tensors.values()) == part.scheme.size_bytes((40, 96), torch.bfloat16)
    assert torch.equal(part.dense(torch.float32), codes.dense())
    actual = CodesPart.read(part.scheme, (40, 96), {f"weight_{n}": t for n, t in tensors.items()}, "weight")
    assert torch.equal(actual.dense(torch.float32), codes.dense())
    assert torch.equal(actual.rows_at(torch.tensor([39, 3]), torch.float32), codes.dense()[[39, 3]])


def test_the_bits_of_a_large_layer_are_those_of_the_paper():
    shape = (1024, 4096)
    bits = 8 * CodesScheme(GRIDS["uint3_tile"], 16, False).size_bytes(shape, torch.bfloat16) / (1024 * 4096)
    assert bits == 3 + 2 * 3 / 16 + 4 * 16 / 256


@pytest.mark.parametrize("name", TILES)
def test_small_groups_with_coarse_scales_are_better_than_large_ones_with_floats(name):
    weight, bits = random(64, 256), GRIDS[name].bits
    tile = quantize(weight, GRIDS[name], 16, False, "mse").dense()
    plain = quantize(weight, GRIDS[f"int{bits}"], 32, False, "mse").dense()  # bits + 0.75 with zero points in bytes
    assert float((tile - weight).norm()) < float((plain - weight).norm())


def test_shared_numbers_without_a_fit_of_scales_cover_the_extents():
    weight = random(16, 32)
    shared = fit_shared(weight, GRIDS["uint3_tile"], 16)
    assert shared is not None and shared.numel() == 4 * 2


def test_widths_of_part_groups_are_refused():
    assert "its 100 inputs are not a multiple of 16" in CodesScheme(GRIDS["uint3_tile"], 16, False).refuses((32, 100))
