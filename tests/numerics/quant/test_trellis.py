"""The bitshift trellis: windows by hand, walks against brute force, tail-biting, and packing."""

import itertools

import pytest
import torch
from draws import random
from hypothesis import given
from hypothesis import strategies as st

from compress.numerics.quant.trellis import Trellis, Viterbi, count_bytes, pack, search_bytes, unpack

FIGURE = torch.tensor([0.5, 0.1, 0.8, 0.3])[:, None]  # values of the states 00, 01, 10, 11 in figure 2 of the paper
SMALL = [
    Trellis(2, 1),
    Trellis(4, 1.5, 2),
    Trellis(3, 1),
    Trellis(3, 2),
    Trellis(4, 2),
    Trellis(4, 1, 2),
    Trellis(3, 3),
]


def windows(text, states, step):
    """The states of a circle of bits: the numbers that its windows of `states` characters spell."""
    return [int((text * 3)[at : at + states], 2) for at in range(0, len(text), step)]


def walks(trellis, steps):
    """The states of all walks, from any first state."""
    mask = 2**trellis.states - 1
    actual = [[first_result] for first_result in range(mask + 1)]
    for _ in range(steps - 1):
        actual = [
            [*walk, (walk[-1] << trellis.step_bits & mask) + c] for walk in actual for c in range(trellis.branches)
        ]
    return torch.tensor(actual)


def errors(sequences, states, values):
    """Squared errors of every sequence for every row of states."""
    return torch.cdist(sequences.double(), values[states].flatten(1).double()).square()


def test_the_example_of_the_paper():
    # figure 2, and two more bits: the circle 00101101 has the states 00 01 10 01 11 10 01 10
    trellis = Trellis(2, 1)
    states = unpack(torch.tensor([[0b00101101]], dtype=torch.uint8), trellis)
    assert states.tolist() == [[0, 1, 2, 1, 3, 2, 1, 2]]
    assert FIGURE[states[0, :6]][:, 0].tolist() == pytest.approx([0.5, 0.1, 0.8, 0.1, 0.3, 0.8])
    assert pack(states, trellis).tolist() == [[0b00101101]]
    sequence = FIGURE[states].flatten(1) + 0.01
    assert torch.equal(Viterbi(FIGURE, trellis).tail_biting(sequence), states)


@pytest.mark.parametrize("trellis", SMALL, ids=str)
def test_walks_are_the_best_of_all(trellis):
    values, steps = random(2**trellis.states, trellis.length, seed=1), 4
    sequences = random(50, steps * trellis.length)
    actual = Viterbi(values, trellis).paths(sequences)
    all_values = walks(trellis, steps)
    best = errors(sequences, all_values, values).min(1)
    assert torch.equal(actual, all_values[best.indices])


@pytest.mark.parametrize("trellis", SMALL, ids=str)
def test_walks_with_an_overlap_are_the_best_of_those_that_have_it(trellis):
    values, steps = random(2**trellis.states, trellis.length, seed=1), 4
    sequences = random(50, steps * trellis.length)
    overlap = torch.arange(50) % trellis.overlaps
    actual = Viterbi(values, trellis).paths(sequences, overlap)
    all_values = walks(trellis, steps)
    begins, ends = all_values[:, 0] >> trellis.step_bits, all_values[:, -1] & (trellis.overlaps - 1)
    for at in range(50):
        allowed = all_values[(begins == overlap[at]) & (ends == overlap[at])]
        assert torch.equal(actual[at], allowed[errors(sequences[at, None], allowed, values)[0].argmin()])


@pytest.mark.parametrize("trellis", [Trellis(4, 1), Trellis(5, 1), Trellis(4, 2)], ids=str)
def test_tail_biting_walks_come_near_the_best_of_all_circles(trellis):
    values, length = random(2**trellis.states, 1, seed=1), 16 // trellis.bits
    sequences = random(60, length)
    actual = Viterbi(values, trellis).tail_biting(sequences)
    circles = torch.tensor(list(itertools.product(range(256), repeat=2)), dtype=torch.uint8)
    all_values = errors(sequences, unpack(circles, trellis), values).amin(1)
    position = (values[actual].flatten(1).double() - sequences.double()).square().sum(1)
    assert (position > all_values - 1e-6).all()
    assert ((position - all_values).abs() < 1e-6).float().mean() > 0.6  # so short circles are the hardest ones
    assert position.sum() < 1.06 * all_values.sum()
    assert torch.equal(unpack(pack(actual, trellis), trellis).long(), actual)


@pytest.mark.parametrize(
    "trellis", [Trellis(6, 2), Trellis(6, 2, 2), Trellis(5, 3), Trellis(7, 4), Trellis(8, 1.5, 2)], ids=str
)
def test_long_walks_are_tail_biting_and_continue_each_other(trellis):
    actual = Viterbi(random(2**trellis.states, trellis.length), trellis).tail_biting(random(20, 64, seed=1))
    assert actual.shape == (20, 64 // trellis.length)
    remaining = trellis.overlaps - 1
    assert torch.equal(actual & remaining, actual.roll(-1, 1) >> trellis.step_bits)
    assert torch.equal(unpack(pack(actual, trellis), trellis).long(), actual)


def test_the_first_search_need_not_see_the_whole_sequence(monkeypatch):
    trellis, values, sequences = Trellis(6, 2), random(64, 1, seed=1), random(200, 256)

    def error():
        return float((values[Viterbi(values, trellis).tail_biting(sequences)].flatten(1) - sequences).square().mean())

    near = error()
    monkeypatch.setattr("compress.numerics.quant.trellis.REACH", 1000)
    assert near == pytest.approx(error(), rel=2e-3)


def test_sequences_that_do_not_fit_at_once_are_searched_in_parts(monkeypatch):
    trellis, values, sequences = Trellis(5, 2), random(32, 1, seed=1), random(30, 32)
    full = Viterbi(values, trellis).tail_biting(sequences)
    monkeypatch.setattr("compress.numerics.quant.trellis.MAX_COSTS", 7 * 33 * trellis.overlaps)
    assert search_bytes(trellis, 32, 30) == 4 * 7 * (33 * 8 + 64)
    assert torch.equal(Viterbi(values, trellis).tail_biting(sequences), full)


@given(
    st.sampled_from([(4, 2, 1), (12, 2, 1), (16, 2, 1), (9, 3, 1), (16, 3, 2), (11, 4, 1), (16, 4, 2), (16, 2, 2)]),
    st.lists(st.binary(min_size=12, max_size=12), min_size=1, max_size=3),
)
def test_every_circle_of_bits_is_a_walk_and_comes_back(sizes, circles):
    trellis = Trellis(*sizes)
    codes = torch.tensor([list(circle) for circle in circles], dtype=torch.uint8)
    states = unpack(codes, trellis)
    texts = ["".join(f"{byte:08b}" for byte in circle) for circle in circles]
    assert states.tolist() == [windows(text, trellis.states, trellis.step_bits) for text in texts]
    assert torch.equal(pack(states, trellis), codes)
    assert count_bytes(states.shape[1] * trellis.length, trellis.bits) == 12


def test_a_step_that_is_wider_than_a_state():
    with pytest.raises(AssertionError, match="more bits than a state has"):
        Trellis(3, 2, 2)
