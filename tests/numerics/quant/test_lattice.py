"""Points of E8: which there are, the nearest one by search over all, bytes by hand, and errors of Gaussian weights."""

import itertools

import pytest
import torch
from draws import random

from compress.numerics.quant.lattice import GAUSSIAN, SHIFT, STAGES, count_bytes, decode, magnitudes, nearest, roots


def every_code():
    """All codes of E8P."""
    first_result, second = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    return torch.stack([first_result, second], dim=-1).view(-1, 2).to(torch.uint8)


def test_the_vectors_of_the_first_byte():
    norms, counts = magnitudes().square().sum(1).unique(return_counts=True)
    assert dict(zip(norms.tolist(), counts.tolist(), strict=True)) == {2: 1, 4: 8, 6: 28, 8: 64, 10: 126, 12: 29}
    assert counts[:5].sum() == 227  # as in the paper
    for row in magnitudes()[-29:]:
        assert sorted(row.tolist()) == [0.5] * 3 + [1.5] * 5


def test_all_points_are_different_and_belong_to_the_shifted_lattice():
    points = decode(every_code(), 2)
    assert len(points.unique(dim=0)) == 2**16
    shift = torch.where(every_code()[:, 1] >= 128, -SHIFT, SHIFT)[:, None]
    halves = points - shift
    assert ((halves - 0.5) % 1 == 0).all() and (halves.sum(1) % 2 == 0).all()


def test_the_points_of_the_third_bit():
    points = roots()
    norms, counts = points.square().sum(1).unique(return_counts=True)
    assert dict(zip(norms.tolist(), counts.tolist(), strict=True)) == {0: 1, 2: 240, 4: 15}
    assert (points.sum(1) % 2 == 0).all() and len(points.unique(dim=0)) == 256


def test_a_code_by_hand():
    # vector 0 is all 1/2, with an even sum: an even number of minus signs. Signs 0b0000001 and the last one; shift down
    code = torch.tensor([[0, 128 + 1]], dtype=torch.uint8)
    assert decode(code, 2).tolist() == [[-0.75, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, -0.75]]
    assert nearest(decode(code, 2), 2).tolist() == [[0, 129]]


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_the_nearest_point_is_found(scale):
    runs = random(60, 8) * scale
    actual = decode(nearest(runs, 2), 2)
    points = decode(every_code(), 2)
    best = torch.cdist(runs.double(), points.double()).amin(1)
    torch.testing.assert_close((runs - actual).norm(dim=1).double(), best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", STAGES)
def test_every_point_comes_back_and_more_bits_are_nearer(bits):
    runs = random(4000, 8)
    codes = nearest(runs / GAUSSIAN[bits], bits)
    assert codes.shape == (4000, count_bytes(bits)) and count_bytes(bits) * 8 == 8 * bits
    error = float((decode(codes, bits) * GAUSSIAN[bits] - runs).square().mean())
    # integers with the best scale: 0.119, 0.037 and 0.0115 (Max 1960, table II)
    assert error < {2: 0.093, 3: 0.031, 4: 0.0092}[bits]
    again = decode(nearest(decode(every_code()[::97], 2), 2), 2)
    assert torch.equal(again, decode(every_code()[::97], 2))


@pytest.mark.parametrize("bits", STAGES)
def test_the_scale_is_the_best_one(bits):
    runs = random(3000, 8, seed=1)
    errors = {
        factor: float(
            (decode(nearest(runs / (GAUSSIAN[bits] * factor), bits), bits) * GAUSSIAN[bits] * factor - runs)
            .square()
            .mean()
        )
        for factor in (0.9, 1.0, 1.1)
    }
    assert min(errors, key=errors.__getitem__) == 1.0
    assert len(list(itertools.chain(*STAGES.values()))) == 5
