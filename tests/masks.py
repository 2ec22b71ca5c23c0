"""Masks to prune with, shared by the tests."""

import torch

from compress.numerics.quant.grids import GRIDS

WITH_ZERO = [name for name, grid in GRIDS.items() if grid.has_zero]
"""Grids that a pruned weight may be rounded to."""


def regular_mask(rows, width, n, m, seed=0):
    """Exactly n of every m columns, drawn at random; the tail is kept."""
    score = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed))
    mask, whole = torch.ones(rows, width, dtype=torch.bool), width // m * m
    rank = score[:, :whole].reshape(rows, -1, m).argsort(2).argsort(2)
    mask[:, :whole] = (rank < n).reshape(rows, whole)
    return mask


def random_mask(rows, width, density, seed=0):
    """Each weight kept by chance."""
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < density


def most_of(mask, m):
    """The largest number of weights that a group of m columns keeps; the tail does not count."""
    return int(mask[:, : mask.shape[1] // m * m].reshape(-1, m).sum(1).max())


def kept_score(score, n, m):
    """The sum of the n largest scores of each m columns, and of the columns after the last whole group."""
    width = score.shape[1] // m * m
    best = score[:, :width].reshape(score.shape[0], -1, m).topk(n, dim=2).values
    return best.sum(dtype=torch.float64) + score[:, width:].sum(dtype=torch.float64)
