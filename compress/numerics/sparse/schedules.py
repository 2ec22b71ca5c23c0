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

    initial, final: s_i, s_f. begin: t_0. end: no update comes after this step. every: dt.
    """

    initial: float
    final: float
    begin: int
    end: int
    every: int

    @property
    def rises(self) -> int:
        """n: the number of updates after the first; at least 1."""
        return max(1, (self.end - self.begin) // self.every)

    @property
    def last(self) -> int:
        """The first step with the final sparsity."""
        return min(self.begin + self.rises * self.every, self.end)

    def due(self, step: int) -> bool:
        """Whether the sparsity changes at this step."""
        return step == self.last or (self.begin <= step < self.last and (step - self.begin) % self.every == 0)

    def at(self, step: int) -> float:
        """The sparsity at a step; 0 before the first update."""
        if step < self.begin:
            return 0.0
        if step >= self.last:
            return self.final
        left = 1 - (step - self.begin) // self.every / self.rises
        return self.final + (self.initial - self.final) * left**3


def partial_mask(pattern: Pattern, score: Float[Tensor, "out in"], density: float) -> Bool[Tensor, "out in"]:
    """The mask for a density on the way to the pattern; at the pattern's own density it equals `pattern.keep`.

    An N:M pattern has only the density N/M. A higher density applies the pattern to a fraction of the groups of M: to
    those with the least removed score. Groups that already lost weights (scores below 0) come first, so that a sequence
    of masks only shrinks.
    """
    if pattern.n_of_m is None:
        return pattern.keep(score, density)
    n, m = pattern.n_of_m
    whole = score.shape[1] // m * m
    groups = score[:, :whole].reshape(-1, m)
    kept = pattern.keep(score[:, :whole], density).reshape(-1, m)
    lost = groups.masked_fill(kept, 0).sum(1)
    lost = torch.where(groups.amin(1) < 0, lost - groups.amax() * m - 1, lost)
    count = min(round((1 - density) / (1 - n / m) * len(groups)), len(groups))
    chosen = top(-lost[None], count)[0]
    found = torch.ones_like(score, dtype=torch.bool)
    found[:, :whole] = (kept | ~chosen[:, None]).reshape(score.shape[0], whole)
    return found
