"""The search of paths in C++, against all paths of small trellises and against the search in plain torch."""

import ctypes
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, random

from compress.native import trellis as native
from compress.native.library import Search, library, pointer
from compress.numerics.quant.trellis import Trellis, Viterbi, decode, pack, unpack

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")


def error_of(states, sequences, values):
    """The squared error of each path, in float64."""
    return (values[states].reshape(len(states), -1).double() - sequences.double()).square().sum(1)


def is_path(states, bits, step_bits):
    """Whether every state begins with the last bits of the one before it."""
    return bool((states[:, 1:] >> step_bits == states[:, :-1] & ((1 << (bits - step_bits)) - 1)).all())


def by_torch(monkeypatch, search, *arguments):
    with monkeypatch.context() as without:
        without.setattr(native, "can_search", lambda *_: False)
        return search(*arguments)


TRELLISES = [(5, 1, 1), (6, 2, 1), (7, 3, 1), (8, 4, 1), (9, 5, 2), (12, 8, 2), (10, 2, 1), (12, 3, 2), (6, 2, 2)]


@pytest.mark.parametrize(("bits", "step_bits", "length"), TRELLISES)
def test_the_paths_of_every_instruction_set(chosen, bits, step_bits, length, monkeypatch):
    values, sequences = random(1 << bits, length), random(7, 24 * length, seed=1)
    search = Viterbi(values, Trellis(bits, step_bits / length, length))
    ends = torch.arange(7) % (1 << (bits - step_bits))
    for overlap in (None, ends):
        actual = native.search(sequences, values, step_bits, overlap)
        assert actual.dtype == torch.int64 and is_path(actual, bits, step_bits)
        if overlap is not None:
            assert torch.equal(actual[:, 0] >> step_bits, ends)
            assert torch.equal(actual[:, -1] & ((1 << (bits - step_bits)) - 1), ends)
        expected = by_torch(monkeypatch, search.paths, sequences, overlap)
        assert torch.allclose(error_of(actual, sequences, values), error_of(expected, sequences, values), rtol=1e-5)


def test_the_best_of_all_paths():
    bits, step_bits, steps = 5, 1, 4
    values, sequences = random(1 << bits, 1, seed=2), random(3, steps, seed=3)
    all_paths = []
    for first_state, *new in itertools.product(range(1 << bits), *[range(2)] * (steps - 1)):
        states = [first_state]
        for bit in new:
            states.append((states[-1] * 2 + bit) % (1 << bits))
        all_paths.append(states)
    all_paths = torch.tensor(all_paths)
    best = torch.stack([error_of(all_paths, row.expand(len(all_paths), -1), values).min() for row in sequences])
    assert torch.allclose(error_of(native.search(sequences, values, step_bits), sequences, values), best)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(TRELLISES), st.integers(1, 9), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_any_number_of_sequences_and_steps(trellis, count, steps, tied, seed):
    bits, step_bits, length = trellis
    values, sequences = random(1 << bits, length, seed=seed), random(count, steps * length, seed=seed + 1)
    overlap = torch.arange(count) % (1 << (bits - step_bits)) if tied else None
    if tied and steps * step_bits < bits - step_bits:
        return  # no path has these overlaps
    actual = native.search(sequences, values, step_bits, overlap)
    assert actual.shape == (count, steps) and is_path(actual, bits, step_bits)
    alone = native.search(sequences[-1:], values, step_bits, None if overlap is None else overlap[-1:])
    assert torch.equal(actual[-1:], alone)


def test_tail_biting_paths_close_their_circle(monkeypatch):
    trellis, sequences = Trellis(12, 2), random(9, 256)
    search = Viterbi(random(1 << 12, 1, seed=4), trellis)
    actual, expected = search.tail_biting(sequences), by_torch(monkeypatch, search.tail_biting, sequences)
    assert torch.equal(actual[:, -1] & (trellis.overlaps - 1), actual[:, 0] >> 2)
    assert (actual == expected).all(1).float().mean() > 0.8


def test_what_is_searched_by_plain_torch():
    x = torch.zeros(1)
    assert native.can_search(x, 12, 2, 1) and native.can_search(x, 6, 2, 2)
    assert not native.can_search(x, 5, 2, 1)  # 8 states with the same first bits
    assert not native.can_search(x, 12, 2, 3) and not native.can_search(x.double(), 12, 2, 1)


def test_no_sequences_and_more_threads_than_sequences():
    values, original = random(64, 1), torch.get_num_threads()
    assert native.search(torch.zeros(0, 8), values, 2).shape == (0, 8)
    assert native.search(torch.zeros(3, 0), values, 2).shape == (3, 0)
    values, sequences = random(1 << 12, 1), random(5, 64)
    expected = native.search(sequences, values, 2)
    try:
        torch.set_num_threads(8)
        assert torch.equal(native.search(sequences, values, 2), expected)
    finally:
        torch.set_num_threads(original)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", -1),
        ("steps", -1),
        ("length", 0),
        ("length", 3),
        ("states", 5),
        ("states", 17),
        ("step_bits", 0),
        ("step_bits", 3),
        ("threads", 0),
    ],
)
def test_the_library_checks_sizes(name, value):
    sequences, values = torch.zeros(2, 4), torch.zeros(1, 64)
    actual = torch.full((2, 4), 7, dtype=torch.int32)
    good = {
        "sequences": pointer(sequences),
        "values": pointer(values),
        "found": pointer(actual),
        "count": 2,
        "steps": 4,
        "length": 1,
        "states": 6,
        "step_bits": 2,
        "threads": 1,
    }
    call = library().compress_search_walks
    assert call(ctypes.addressof(wrong := Search(**good | {name: value}))) == -1 and wrong and (actual == 7).all()
    assert call(ctypes.addressof(right := Search(**good))) == 0 and right and (actual != 7).all()


def test_an_overlap_that_no_state_has():
    for overlap in ([0, 16], [-1, 0]):
        with pytest.raises(RuntimeError, match="do not fit"):
            native.search(torch.zeros(2, 4), torch.zeros(64, 1), 2, torch.tensor(overlap))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 16), st.integers(1, 8), st.integers(1, 2), st.integers(1, 9), st.integers(0, 70), st.integers(0, 99)
)
def test_the_values_of_paths(states, step_bits, length, units, count, seed):
    step_bits = min(step_bits, states)
    size, created = units * step_bits, torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (count, size), dtype=torch.uint8, generator=created)
    values, trellis = random(1 << states, length, seed=seed), Trellis(states, step_bits / length, length)
    assert torch.equal(decode(codes, values, trellis), values[unpack(codes, trellis)].flatten(1))
    assert not count or torch.equal(pack(unpack(codes, trellis), trellis), codes)


@pytest.mark.parametrize("place", range(3, 9))
def test_the_library_checks_the_sizes_of_paths(place):
    codes, values, actual = torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(64, 1), torch.zeros(2, 16)
    good = [pointer(codes), pointer(values), pointer(actual), 2, 4, 6, 2, 1, 1]
    call = library().compress_decode_walks
    for wrong in (-1, 17) if place == 5 else (-1,):
        assert call(*(wrong if i == place else value for i, value in enumerate(good))) == -1
    assert call(*good) == 0
