"""Divergences and their gradients: by hand, against plain autograd, and what must hold for all of them."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.numerics.metrics import DIVERGENCES, SoftTargets, distillation_loss, divergence, soft_targets

P, Q = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]

kinds = pytest.mark.parametrize("kind", DIVERGENCES)


def logits_of(probabilities, temperature=1.0):
    return temperature * torch.tensor([probabilities]).log() + 3.0


def by_hand(kind, p, q):
    """(value, gradient by q's logits) of a divergence, from its formula.

    With g_i = dD/dq_i, the gradient by a logit is q_i (g_i - sum_j q_j g_j).
    """
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def kl(x, y):
        return sum(a * math.log(a / b) for a, b in zip(x, y, strict=True))

    pairs = list(zip(p, q, strict=True))
    value, slopes = {
        "forward_kl": (kl(p, q), [-a / b for a, b in zip(p, q, strict=True)]),
        "reverse_kl": (kl(q, p), [math.log(b / a) + 1 for a, b in zip(p, q, strict=True)]),
        "js": ((kl(p, m) + kl(q, m)) / 2, [math.log(b / c) / 2 for b, c in zip(q, m, strict=True)]),
        "tv": (sum(abs(a - b) for a, b in pairs) / 2, [math.copysign(0.5, b - a) for a, b in pairs]),
    }[kind]
    mean = sum(b * g for b, g in zip(q, slopes, strict=True))
    return value, [b * (g - mean) for b, g in zip(q, slopes, strict=True)]


@kinds
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_value_and_gradient_by_hand(kind, temperature):
    """T^2 D(p, q) with q = softmax(z / T); its gradient by z is T times that by z / T."""
    logits = logits_of(Q, temperature).requires_grad_()
    targets = soft_targets(logits_of(P, temperature), temperature, None)
    loss = distillation_loss(kind, logits, targets, temperature)
    loss.backward()
    value, gradient = by_hand(kind, P, Q)
    assert loss.item() == pytest.approx(temperature**2 * value, rel=1e-5)
    assert logits.grad[0].tolist() == pytest.approx([temperature * g for g in gradient], rel=1e-4, abs=1e-6)


def test_figures_that_one_can_check_on_paper():
    kl = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)
    targets = soft_targets(logits_of(P), 1.0, None)
    assert divergence("forward_kl", logits_of(Q), targets, 1.0).item() == pytest.approx(kl, rel=1e-5)
    assert divergence("tv", logits_of(Q), targets, 1.0).item() == pytest.approx(0.3, rel=1e-5)
    logits = logits_of(Q).requires_grad_()
    distillation_loss("forward_kl", logits, targets).backward()
    assert logits.grad[0].tolist() == pytest.approx([-0.25, -0.05, 0.3], abs=1e-6)  # q - p


@kinds
@pytest.mark.parametrize("top_k", [None, 3])
def test_teacher_and_student_alike_lose_nothing_and_move_nothing(kind, top_k):
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = distillation_loss(kind, logits, soft_targets(logits.detach(), 2.0, top_k), 2.0)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    if kind != "tv":  # which has a corner there
        loss.backward()
        assert logits.grad.abs().max() < 1e-6


@kinds
@settings(max_examples=25)
@given(seed=st.integers(0, 2**16), chunk=st.sampled_from([1, 3, 64]), top_k=st.sampled_from([None, 1, 4, 8, 9]))
def test_chunks_and_weights_are_plain_autograd(kind, seed, chunk, top_k):
    draw = torch.Generator().manual_seed(seed)
    teacher, student = torch.randn(7, 9, generator=draw), torch.randn(7, 9, generator=draw)
    weights = torch.rand(7, generator=draw).softmax(0)
    targets = soft_targets(teacher, 1.5, top_k)
    actual, expected = student.clone().requires_grad_(), student.clone().requires_grad_()
    loss = distillation_loss(kind, actual, targets, 1.5, weights, chunk)
    plain = 1.5**2 * (divergence(kind, expected, targets, 1.5) * weights).sum()
    (3 * loss).backward()
    (3 * plain).backward()
    assert torch.allclose(loss, plain, atol=1e-6)
    assert torch.allclose(actual.grad, expected.grad, atol=1e-5)


@kinds
def test_joined_cells_are_a_lower_bound_that_becomes_exact(kind):
    """Data processing: no divergence of this kind grows when cells are joined."""
    draw = torch.Generator().manual_seed(3)
    teacher, student = 3 * torch.randn(20, 64, generator=draw), 3 * torch.randn(20, 64, generator=draw)
    actual = [divergence(kind, student, soft_targets(teacher, 1.0, k), 1.0) for k in (1, 4, 16, 63, 64)]
    for fewer, more in pairwise(actual):
        assert bool((fewer <= more + 1e-5).all())
    assert torch.allclose(actual[-2], actual[-1], atol=1e-5)
    assert actual[0].mean() < 0.95 * actual[-1].mean()


def test_kept_cells_sum_to_one():
    targets = soft_targets(torch.randn(4, 10), 0.7, 3)
    assert targets.index.shape == (4, 3) and targets.index.dtype == torch.int32
    assert torch.allclose(targets.cells.exp().sum(-1), torch.ones(4))
    part = targets.part(slice(1, 3))
    assert torch.equal(part.cells, targets.cells[1:3])


def test_a_vanishing_rest_gives_no_nan():
    """Nothing else is possible: the mass of the rest is 0 in float32."""
    sharp = torch.tensor([[500.0, 0.0, -500.0]]).requires_grad_()
    targets = soft_targets(torch.tensor([[400.0, 0.0, -400.0]]), 1.0, 1)
    for kind in DIVERGENCES:
        sharp.grad = None
        loss = distillation_loss(kind, sharp, targets)
        loss.backward()
        assert loss.item() == pytest.approx(0, abs=1e-6) and bool(sharp.grad.isfinite().all())


def test_without_gradients_only_the_value_is_computed():
    logits = torch.randn(4, 5)
    with torch.no_grad():
        loss = distillation_loss("js", logits, soft_targets(torch.randn(4, 5), 1.0, None))
    assert not loss.requires_grad and loss > 0


def test_all_tokens_are_cells_without_an_index():
    targets = SoftTargets(torch.tensor([P]).log())
    assert torch.equal(targets.cells, targets.log_probs)
