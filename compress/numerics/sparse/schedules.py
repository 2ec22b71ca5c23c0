"""Sparsity schedules over training steps, and masks on the way to an N:M pattern."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.numerics.sparse.masks import Pattern, top


@dataclass(frozen=True)
class Cubic:
    """The cubic sparsity schedule: fast growth at first, slow growth at the end (Zhu & Gupta 2017, equation 1).

    s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 for t = t_0, t_0 + dt, ..., t_0 + n dt; constant in between.

    Attributes:
        initial: s_i.
        final: s_f.
        begin: t_0.
        end: the last step with an update.
        interval: dt, in steps.
    """

    initial: float
    final: float
    begin: int
    end: int
    interval: int

    @property
    def rises(self) -> int:
        """The number of updates after the first one, n; at least 1."""
        return max(1, (self.end - self.begin) // self.interval)

    @property
    def last(self) -> int:
        """The first step with the final sparsity."""
        return min(self.begin + self.rises * self.interval, self.end)

    def due(self, step: int) -> bool:
        """Whether the sparsity changes at this step."""
        return step == self.last or (self.begin <= step < self.last and (step - self.begin) % self.interval == 0)

    def at(self, step: int) -> float:
        """Return the sparsity at a step; 0 before the first update."""
        if step < self.begin:
            return 0.0
        if step >= self.last:
            return self.final
        remaining_fraction = 1 - (step - self.begin) // self.interval / self.rises
        return self.final + (self.initial - self.final) * remaining_fraction**3


def partial_mask(pattern: Pattern, score: Float[Tensor, "out in"], density: float) -> Bool[Tensor, "out in"]:
    """Return the mask of a density between dense and the pattern.

    At the pattern's own density it equals `pattern.keep`. An N:M pattern has only the density N/M. A higher density
    applies
    the pattern to a fraction of the groups of M: to those with the least removed score. Groups that already lost
    weights
    (scores below 0) come first, so that a sequence of masks only shrinks.
    """
    if pattern.n_of_m is None:
        return pattern.keep(score, density)
    n, m = pattern.n_of_m
    full_width = score.shape[1] // m * m
    groups = score[:, :full_width].reshape(-1, m)
    mask = pattern.keep(score[:, :full_width], density).reshape(-1, m)
    removed_score = groups.masked_fill(mask, 0).sum(1)
    removed_score = torch.where(groups.amin(1) < 0, removed_score - groups.amax() * m - 1, removed_score)
    count = min(round((1 - density) / (1 - n / m) * len(groups)), len(groups))
    chosen = top(-removed_score[None], count)[0]
    result = torch.ones_like(score, dtype=torch.bool)
    result[:, :full_width] = (mask | ~chosen[:, None]).reshape(score.shape[0], full_width)
    return result
