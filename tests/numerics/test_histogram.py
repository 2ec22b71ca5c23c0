"""Histograms against numpy, and by hand."""

import numpy as np
import torch

from compress.numerics.histogram import BINS, SAMPLE, histogram


def test_counts_are_those_of_numpy():
    before = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    after = before.round(decimals=1)
    found = histogram(before, after)
    limit = max(before.abs().max().item(), after.abs().max().item())
    assert found.limit == limit and found.changed
    for counts, values in ((found.before, before), (found.after, after)):
        expected, _ = np.histogram(values.double().numpy(), BINS, (-limit, limit))
        assert sum(counts) == values.numel() and np.abs(np.array(counts) - expected).sum() <= 4  # float32 at the edges


def test_zero_has_a_bin_of_its_own():
    found = histogram(torch.tensor([[-1.0, 1.0]]), torch.zeros(1, 2))
    assert found.after[BINS // 2] == 2 and found.before[0] == found.before[-1] == 1
    assert histogram(torch.zeros(3), torch.zeros(3)).changed is False


def test_a_large_tensor_is_sampled_and_its_limit_is_not():
    values = torch.zeros(3 * SAMPLE)
    values[1] = 7.0
    found = histogram(values, values)
    assert found.limit == 7 and sum(found.before) == SAMPLE


def test_values_that_are_not_finite():
    assert histogram(torch.tensor([float("inf")]), torch.zeros(1)) is None
    assert histogram(torch.zeros(1), torch.tensor([float("nan")])) is None
