"""Observers against numpy, whatever the order of the tokens and the sizes of the batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import NumericError
from compress.numerics.linalg import Regularization
from compress.passes.contract.observers import Gram, InputAbsMax, InputNorm, InputRange, Nothing, UnitGram
from compress.passes.contract.samples import Sample

CPU = torch.device("cpu")


@st.composite
def rows_in_batches(draw):
    """(rows [tokens, in], the same rows shuffled and cut into batches, some of them empty)."""
    tokens, width = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    rows = torch.randn(tokens, width, generator=generator) * 10 ** draw(st.integers(-3, 3))
    cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=5)))
    sizes = np.diff([0, *cuts, tokens]).tolist()
    return rows, rows[torch.randperm(tokens, generator=generator)].split(sizes)


def feed(observer, batches):
    for batch in batches:
        observer.update(batch)
    return observer


@given(rows_in_batches())
def test_the_norm_of_every_channel(drawn):
    rows, batches = drawn
    seen = feed(InputNorm(rows.shape[1], CPU), batches)
    np.testing.assert_allclose(seen.norm, np.linalg.norm(rows.double().numpy(), axis=0), rtol=1e-6)
    assert seen.tokens == len(rows) and seen.norm.dtype == torch.float32


@given(rows_in_batches())
def test_the_largest_magnitude_of_every_channel(drawn):
    rows, batches = drawn
    seen = feed(InputAbsMax(rows.shape[1], CPU), batches)
    np.testing.assert_array_equal(seen.absmax, np.abs(rows.numpy()).max(axis=0))


@given(rows_in_batches())
def test_the_range_of_every_channel(drawn):
    rows, batches = drawn
    seen = feed(InputRange(rows.shape[1], CPU), batches)
    assert torch.equal(seen.low, rows.amin(0)) and torch.equal(seen.high, rows.amax(0))
    unseen = InputRange(3, CPU)
    assert unseen.low.tolist() == unseen.high.tolist() == [0.0, 0.0, 0.0]


@given(rows_in_batches())
def test_the_hessian_of_the_squared_error(drawn):
    rows, batches = drawn
    seen = feed(Gram(rows.shape[1], CPU), batches)
    x = rows.double().numpy()
    np.testing.assert_allclose(seen.hessian, 2 / len(x) * x.T @ x, rtol=1e-4, atol=1e-5 * np.square(x).max())


def test_a_norm_over_many_tokens_loses_nothing_to_rounding():
    seen = InputNorm(1, CPU)
    for _ in range(300):
        seen.update(torch.full((65536, 1), 0.1))  # in float32 a sum of 2e7 equal squares would be off by far more
    assert float(seen.norm) == pytest.approx(0.1 * (300 * 65536) ** 0.5, rel=1e-6)


def test_half_precision_is_gathered_in_float32():
    rows = torch.full((4, 2), 300.0, dtype=torch.float16)  # its square is beyond float16
    assert feed(InputNorm(2, CPU), [rows]).norm.tolist() == [600, 600]
    assert feed(Gram(2, CPU), [rows]).hessian.tolist() == [[180_000] * 2] * 2


@pytest.mark.parametrize("kind", [Nothing, InputNorm, InputAbsMax, InputRange, Gram])
def test_no_token_is_no_change(kind):
    seen = feed(kind(3, CPU), [torch.empty(0, 3)])
    assert seen.tokens == 0
    seen.update(torch.ones(2, 3))
    assert seen.tokens == 2


PLAIN = Regularization(0.01, 0)


def factored(rows, regularization=PLAIN, order=None):
    return feed(Gram(rows.shape[1], CPU), [rows]).factor(regularization, order)


@pytest.mark.parametrize("shrinkage", [0, 0.25])
def test_the_factor_is_that_of_the_regularized_inverse(shrinkage):
    rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 1, 0, 5, 4, 2])
    for chosen in (None, order):
        factor, damping, dead = factored(rows, Regularization(0.01, shrinkage), chosen)
        x = rows.double().numpy()
        x = x if chosen is None else x[:, order]
        hessian = 2 / 50 * x.T @ x
        hessian = (1 - shrinkage) * hessian + shrinkage * np.diag(hessian.diagonal())
        hessian += np.eye(6) * 0.01 * hessian.diagonal().mean()
        np.testing.assert_allclose(factor.T @ factor, np.linalg.inv(hessian), rtol=1e-4, atol=1e-5)
        assert damping == 0.01 and dead == 0 and torch.equal(factor, factor.triu())


def test_channels_that_were_always_zero_stand_alone():
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    rows[:, 2] = 0
    factor, _, dead = factored(rows)
    assert dead == 1
    assert factor[2, [0, 1, 3]].tolist() == [0, 0, 0] and factor[[0, 1, 3], 2].tolist() == [0, 0, 0]


def test_channels_that_were_always_zero_leave_the_factor_of_the_others_as_it_is():
    rows = 0.01 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(50, 6)
    wide[:, [0, 1, 3, 5]] = rows
    alone, (factor, used, dead) = factored(rows)[0], factored(wide)
    assert (used, dead) == (0.01, 2)
    torch.testing.assert_close(factor[[0, 1, 3, 5]][:, [0, 1, 3, 5]], alone)
    assert (1 / factor.diagonal()[[2, 4]].square() < 0.1 / alone.diagonal().square().max()).all()  # pruned first


def test_layers_of_one_input_share_a_factor_until_more_is_seen():
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    seen = feed(Gram(4, CPU), [rows])
    first, _, _ = seen.factor(PLAIN)
    assert seen.factor(Regularization(0.01, 0))[0] is first
    assert not torch.equal(seen.factor(Regularization(0.1, 0))[0], first)
    assert not torch.equal(seen.factor(Regularization(0.01, 0.1))[0], first)
    assert not torch.equal(seen.factor(PLAIN, torch.tensor([3, 2, 1, 0]))[0], first)
    seen.update(2 * rows)
    assert not torch.equal(seen.factor(PLAIN)[0], first)


def test_inputs_that_are_not_finite_have_no_factor():
    with pytest.raises(NumericError, match="NaN or infinity"):
        factored(torch.tensor([[1.0, float("nan")]]))


def test_a_sample_is_spread_over_each_batch_and_bounded():
    sample = Sample()
    assert sample.rows is None
    batches = [torch.arange(1000.0)[:, None] + 1000 * i for i in range(20)]
    for batch in batches:
        sample.update(batch)
    assert sample.rows.shape[0] <= Sample.ROWS
    first = sample.rows[sample.rows < 1000]
    assert first[0] == 0 and first[-1] >= 900 and len(first) <= Sample.ROWS_PER_BATCH
    assert len(set(first.diff().tolist())) == 1


@given(rows_in_batches())
def test_a_sample_holds_rows_that_came_by(drawn):
    rows, batches = drawn
    sample = feed(Sample(), batches)
    known = {tuple(row) for row in rows.tolist()}
    assert {tuple(row) for row in sample.rows.tolist()} <= known


def test_a_sample_is_a_copy():
    sample, rows = Sample(), torch.ones(2, 3)
    sample.update(rows)
    rows.zero_()
    assert torch.equal(sample.rows, torch.ones(2, 3))


@given(rows_in_batches())
def test_the_gram_of_unit_rows_is_that_of_directions(drawn):
    rows, batches = drawn
    lengths = rows.double().norm(dim=1, keepdim=True)
    unit = (rows.double() / lengths.clamp(min=1e-12)).numpy()
    assert np.allclose(feed(UnitGram(rows.shape[1], CPU), batches).hessian, 2 / len(rows) * unit.T @ unit, atol=1e-5)


@pytest.mark.parametrize("kind", [Gram, UnitGram])
def test_the_hessian_hardly_depends_on_the_order_of_sequences_nor_on_batches(kind):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 256, 24, generator=draw)
    rows[:, 0] *= 1000  # attention sinks
    one = feed(kind(24, CPU), rows.flatten(0, 1).split(4 * 256)).hessian
    other = feed(kind(24, CPU), rows[torch.randperm(64, generator=draw)].flatten(0, 1).split(256)).hessian
    size = one.diagonal().sqrt()
    assert float(((one - other).abs() / (size[:, None] * size)).max()) < 1.3e-7  # one unit of float32's last place
