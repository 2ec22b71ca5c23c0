"""Histograms against numpy, and by hand."""

import numpy as np
import torch

from compress.numerics.histogram import BINS, SAMPLE
from compress.numerics.metrics import histogram


def test_counts_are_those_of_numpy():
    original = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    updated = original.round(decimals=1)
    actual = histogram(original, updated)
    limit = max(original.abs().max().item(), updated.abs().max().item())
    assert actual.limit == limit and actual.changed
    for counts, values in ((actual.before, original), (actual.after, updated)):
        expected, _ = np.histogram(values.double().numpy(), BINS, (-limit, limit))
        assert sum(counts) == values.numel() and np.abs(np.array(counts) - expected).sum() <= 4  # float32 at the edges


def test_zero_has_a_bin_of_its_own():
    actual = histogram(torch.tensor([[-1.0, 1.0]]), torch.zeros(1, 2))
    assert actual.after[BINS // 2] == 2 and actual.before[0] == actual.before[-1] == 1
    assert histogram(torch.zeros(3), torch.zeros(3)).changed is False


def test_a_large_tensor_is_sampled_and_its_limit_is_not():
    values = torch.zeros(3 * SAMPLE)
    values[1] = 7.0
    actual = histogram(values, values)
    assert actual.limit == 7 and sum(actual.before) == SAMPLE


def test_values_that_are_not_finite():
    assert histogram(torch.tensor([float("inf")]), torch.zeros(1)) is None
    assert histogram(torch.zeros(1), torch.tensor([float("nan")])) is None
