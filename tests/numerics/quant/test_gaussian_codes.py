"""Codes of states: values by whole numbers, the Gaussian statistic, and the paper's errors for a Gaussian source."""

import math
import struct

import pytest
import torch
from draws import random

from compress.numerics.quant.gaussian_codes import (
    CODES,
    best_scale,
    first_table,
    hybrid,
    length_of,
    one_mad,
    three_instructions,
    values_of,
)
from compress.numerics.quant.trellis import Trellis, Viterbi

SOME = [0, 1, 2, 77, 4095, 4096, 40000, 65535]


def all_values(code, states):
    return values_of(code, states, first_table() if code == "hyb" else None)


def error(code, states, bits, count=64, factor=1.0):
    """The mean squared error of a Gaussian source in sequences of 256."""
    values, source = all_values(code, states), random(count, 256, seed=5)
    scale = factor * best_scale(bits, values)
    actual = Viterbi(values, Trellis(states, bits, length_of(code))).tail_biting(source / scale)
    return float((values[actual].flatten(1) * scale - source).square().mean())


def test_1mad_by_bytes():
    expected = [(sum(((34038481 * x + 76625530) % 2**32).to_bytes(4, "little")) - 510) / 147.8 for x in SOME]
    torch.testing.assert_close(one_mad(torch.tensor(SOME)), torch.tensor(expected))


def test_3inst_by_bits_of_float16():
    expected = []
    for x in SOME:
        halves = struct.unpack("<HH", ((89226354 * x + 64248484) % 2**32).to_bytes(4, "little"))
        # sign, the last two bits of the exponent and the mantissa of 0.922 in float16, 0x3b60
        numbers = [struct.unpack("<e", struct.pack("<H", (half & 0x8FFF) ^ 0x3B60))[0] for half in halves]
        expected.append(struct.unpack("<e", struct.pack("<e", sum(numbers)))[0])
    assert three_instructions(torch.tensor(SOME)).tolist() == expected


def test_hyb_by_bits_of_the_hash():
    table = torch.arange(1024.0).view(512, 2) + 1
    expected = []
    for x in SOME:
        bits = f"{x * x + x:032b}"[::-1]
        first_result, second = table[int(bits[6:15][::-1], 2)].tolist()
        expected.append([first_result, -second if bits[15] == "1" else second])
    assert hybrid(torch.tensor(SOME), table).tolist() == expected


@pytest.mark.parametrize(
    ("code", "variance"),
    # four bytes of variance (256^2 - 1) / 12. Two numbers uniform between 2^e and 2^(e+1) for e of -3 to 0
    [("1mad", (256**2 - 1) / 3 / 147.8**2), ("3inst", 2 * 7 / 3 * (1 + 1 / 4 + 1 / 16 + 1 / 64) / 4), ("hyb", 1)],
)
def test_values_look_gaussian(code, variance):
    values = all_values(code, 16).double()
    assert abs(float(values.mean())) < 0.02
    assert float(values.square().mean()) == pytest.approx(variance, rel=0.01)
    kurtosis = float(values.pow(4).mean() / values.square().mean() ** 2)
    assert 2.4 < kurtosis < 3.6  # 3; of a uniform distribution 1.8
    # the values after a state: the same bits, and two new ones
    updated = values[:, 0].view(-1, 4 ** length_of(code)).std(1) / math.sqrt(variance)
    assert updated.mean() > 0.75 and (updated < 0.1).float().mean() < 0.02


@pytest.mark.parametrize("code", ["1mad", "3inst"])
@pytest.mark.parametrize(("bits", "paper"), [(2, 0.0733), (3, 0.0198), (4, 0.0055)])
def test_the_errors_of_table_2_with_4096_states(code, bits, paper):
    assert 4.0**-bits < error(code, 12, bits) < 1.035 * paper


@pytest.mark.parametrize(("bits", "wanted"), [(1, 0.277), (1.5, 0.144), (2.5, 0.040)])
def test_pairs_take_half_bits_too(bits, wanted):
    """Near the rate distortion of a Gaussian source, 4^-bits, and worse than it; the best scale is within 1%."""
    actual = error("hyb", 12, bits)
    assert actual == pytest.approx(wanted, rel=0.04) and 4**-bits < actual < 1.35 * 4**-bits
    assert actual < 1.01 * min(error("hyb", 12, bits, factor=factor) for factor in (0.96, 1.04))


@pytest.mark.slow
@pytest.mark.parametrize(("code", "paper"), [("1mad", 0.069), ("3inst", 0.069), ("hyb", 0.071)])
def test_the_errors_of_table_1_with_65536_states(code, paper):
    assert error(code, 16, 2) == pytest.approx(paper, rel=0.02)


@pytest.mark.parametrize("code", CODES)
def test_more_states_and_more_bits_are_better(code):
    position = error(code, 9, 2, 24)
    assert error(code, 11, 2, 24) < 0.95 * position and error(code, 9, 3, 24) < 0.4 * position


@pytest.mark.parametrize("code", CODES)
def test_the_scale_is_the_best_one(code):
    errors = {factor: error(code, 12, 2, 24, factor) for factor in (0.92, 1.0, 1.08)}
    assert min(errors, key=errors.__getitem__) == 1.0
