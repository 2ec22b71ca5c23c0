"""Attention of many queries by the C++ library, against softmax(q k^T scale + mask) v in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, random

from compress.kernels.cpu.attention import attend, attends

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")

LOWEST = torch.finfo(torch.float32).min
NEAR = 3e-6  # relative to the largest value


def plainly(q, k, v, mask=None, causal=False, scale=1.0):
    """In float64; zeros for queries that see nothing."""
    shared = q.shape[1] // k.shape[1]
    k, v = (single.double().repeat_interleave(shared, 1) for single in (k, v))
    scores = (q.double() @ k.mT * scale).float()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores.double().softmax(-1).nan_to_num(0.0) @ v


def close(actual, expected, v):
    return actual.shape == expected.shape and float((actual - expected).abs().max()) <= NEAR * float(v.abs().max())


def masks(kind, sizes, seed):
    """A mask of a kind; each of the first three sizes may be one that is broadcast."""
    if kind is None:
        return None
    open_ = random(*sizes, seed=seed) > -0.7
    if kind == "triangle":
        return torch.ones(sizes, dtype=torch.bool).tril()
    if kind == "window":
        return torch.ones(sizes, dtype=torch.bool).tril().triu(-9)
    if kind == "bool":
        return open_
    return random(*sizes, seed=seed).masked_fill(~open_, LOWEST if kind == "lowest" else -torch.inf)


@settings(max_examples=150)
@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 230),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([None, "bool", "triangle", "window", "float", "lowest"]),
    st.tuples(*[st.booleans()] * 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_call(batch, groups, shared, queries, keys, width, out, kind, whole, causal, turned, seed):
    heads = groups * shared

    def rows(heads, count, width, seed):
        if turned:  # as a layer before it gives them
            return random(batch, count, heads, width + 1, seed=seed)[..., :width].transpose(1, 2)
        return random(batch, heads, count, width, seed=seed)

    q, k, v = rows(heads, queries, width, seed), rows(groups, keys, width, seed + 1), rows(groups, keys, out, seed + 2)
    sizes = [size if all_ else 1 for size, all_ in zip((batch, heads, queries), whole, strict=True)]
    mask = masks(kind, (*sizes, keys), seed)
    assert attends(q, k, v, mask, shares_heads=True)
    actual = attend(q, k, v, mask, causal, 0.4)
    assert close(actual, plainly(q, k, v, mask, causal, 0.4), v)


@pytest.mark.parametrize("causal", [False, True])
def test_every_instruction_set(chosen, causal):
    q, k, v = random(2, 6, 100, 48), random(2, 2, 250, 48, seed=1), random(2, 2, 250, 40, seed=2)
    observed = random(2, 1, 100, 250, seed=3) > -0.5
    assert close(attend(q, k, v, None, causal, 0.2), plainly(q, k, v, None, causal, 0.2), v)
    assert close(attend(q, k, v, observed, causal, 0.2), plainly(q, k, v, observed, causal, 0.2), v)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_sizes_of_scores(size):
    q, k, v = random(1, 2, 40, 16) * size, random(1, 2, 120, 16, seed=1), random(1, 2, 120, 16, seed=2)
    actual = attend(q, k, v, None, False, 0.25)
    # Rounding moves scores of 1e3 by 1e-4, and weights as much.
    assert float((actual - plainly(q, k, v, scale=0.25)).abs().max()) <= 1e-6 * max(4, size)


def test_queries_that_see_nothing_get_zeros_and_others_are_not_touched(chosen):
    q, k, v = random(1, 2, 50, 16), random(1, 2, 50, 16, seed=1), random(1, 2, 50, 16, seed=2)
    observed = torch.ones(1, 1, 50, 50, dtype=torch.bool).tril()
    observed[:, :, :20] = False
    actual = attend(q, k, v, observed, False, 0.25)
    assert actual[:, :, :20].eq(0).all() and close(actual, plainly(q, k, v, observed, False, 0.25), v)


def test_a_query_whose_keys_all_have_the_lowest_bias_weighs_them_alike():
    q, k, v = random(1, 1, 20, 8), random(1, 1, 30, 8, seed=1), random(1, 1, 30, 8, seed=2)
    actual = attend(q, k, v, torch.full((20, 30), LOWEST), False, 0.25)
    assert torch.allclose(actual, v.mean(2, keepdim=True).expand_as(actual), atol=1e-6)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FC12345])
def test_nan_reaches_those_who_see_it(chosen, bits):
    q, k, v = random(1, 1, 40, 16), random(1, 1, 40, 16, seed=1), random(1, 1, 40, 16, seed=2)
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    q[0, 0, 3, 5] = nan
    assert attend(q, k, v, None, True, 0.25).isnan().all(-1).nonzero()[:, -1].tolist() == [3]
    k[0, 0, 30, 2] = nan
    assert attend(q, k, v, None, True, 0.25).isnan().all(-1).nonzero()[:, -1].tolist() == [3, *range(30, 40)]
    v[0, 0, 35, 7] = nan
    assert attend(q, k, v, None, True, 0.25)[0, 0, :, 7].isnan().nonzero()[:, 0].tolist() == [3, *range(30, 40)]


@pytest.mark.parametrize("sizes", [(0, 2, 20, 8), (1, 2, 0, 8)])
def test_nothing_to_attend_to(sizes):
    q = random(*sizes)
    assert attend(q, q, q, None, True, 1.0).shape == sizes


def test_as_many_threads_give_the_bits_of_one():
    q, k, v = random(1, 4, 300, 32), random(1, 4, 300, 32, seed=1), random(1, 4, 300, 32, seed=2)
    original, actual = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 40):
            torch.set_num_threads(threads)
            actual.append(attend(q, k, v, None, True, 0.2))
    finally:
        torch.set_num_threads(original)
    assert actual[0].equal(actual[1]) and actual[0].equal(actual[2])


def test_what_torch_computes():
    q, k = random(1, 4, 20, 8), random(1, 2, 20, 8)
    assert attends(q, k, k, None, shares_heads=True)
    assert not attends(q, k, k, None, shares_heads=False)  # torch repeats no heads by itself
    assert not attends(q.double(), k, k, None, shares_heads=True)
    assert not attends(q[0], k, k, None, shares_heads=True)
    assert not attends(q, k[:, :, :0], k[:, :, :0], None, shares_heads=True)
    assert not attends(q, k, k, torch.ones(20, 20, dtype=torch.int64), shares_heads=True)
    assert not attends(q.clone().requires_grad_(), k, k, None, shares_heads=True)
    assert not attends(q.to("meta"), k, k, None, shares_heads=True)
    assert not attends(q.half(), k.half(), k.half(), None, shares_heads=True)
    assert not attends(q.bfloat16(), k, k, None, shares_heads=True)
    assert not attends(q, k, k, torch.ones(20, 20).bfloat16(), shares_heads=True)


@pytest.mark.parametrize("kind", [None, "bool", "lowest"])
def test_bfloat16_is_computed_in_float32(kind):
    q, k, v = (random(1, heads, 40, 8, seed=heads).bfloat16() for heads in (4, 2, 2))
    mask = masks(kind, (1, 4, 40, 40), 0)
    mask = mask.bfloat16() if kind == "lowest" else mask
    assert attends(q, k, v, mask, shares_heads=True)
    actual = attend(q, k, v, mask, kind is None, 0.3)
    expected = plainly(q, k, v, mask if kind != "lowest" else mask.float(), kind is None, 0.3)
    assert actual.dtype is torch.bfloat16 and actual.transpose(1, 2).is_contiguous()
    assert torch.allclose(actual.double(), expected, rtol=2**-8, atol=1e-6)


def test_the_operator_tells_torch_its_shape():
    q, k, v = random(1, 4, 20, 8), random(1, 2, 30, 8), random(1, 2, 30, 12)
    torch.library.opcheck(torch.ops.compress.attend, (q, k, v, None, True, 0.5))
    torch.library.opcheck(torch.ops.compress.attend, (q, k, v, torch.ones(20, 30, dtype=torch.bool), False, 0.5))
    narrow = (single.bfloat16() for single in (q, k, v))
    torch.library.opcheck(torch.ops.compress.attend, (*narrow, torch.zeros(20, 30).bfloat16(), False, 0.5))


def test_sizes_that_do_not_fit_are_refused():
    q, k = random(1, 3, 20, 8), random(1, 2, 20, 8)
    with pytest.raises(RuntimeError, match="do not fit"):
        attend(q, k, k, None, False, 1.0)
