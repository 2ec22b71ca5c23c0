"""How sparsity grows over the steps of a training, and masks on the way to an N:M pattern."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.numerics.sparse.masks import Pattern, top


@dataclass(frozen=True)
class Cubic:
    """Sparsity that grows fast at first and slowly at last (Zhu & Gupta 2017, equation 1).

    s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 for t = t_0, t_0 + dt, ..., t_0 + n dt; in between it stays.

    initial, final: s_i, s_f. begin: t_0. end: the last of these steps is the last that is not behind it. every: dt.
    """

    initial: float
    final: float
    begin: int
    end: int
    every: int

    @property
    def rises(self) -> int:
        """n: how often it rises; once at least."""
        return max(1, (self.end - self.begin) // self.every)

    @property
    def last(self) -> int:
        """The step from which on it is final."""
        return min(self.begin + self.rises * self.every, self.end)

    def due(self, step: int) -> bool:
        """Whether the sparsity is another than in the step before."""
        return step == self.last or (self.begin <= step < self.last and (step - self.begin) % self.every == 0)

    def at(self, step: int) -> float:
        """The sparsity after so many steps; none before the first."""
        if step < self.begin:
            return 0.0
        if step >= self.last:
            return self.final
        left = 1 - (step - self.begin) // self.every / self.rises
        return self.final + (self.initial - self.final) * left**3


def partly(pattern: Pattern, score: Float[Tensor, "out in"], density: float) -> Bool[Tensor, "out in"]:
    """What to keep at a density on the way to the pattern; at the pattern's own density, `pattern.keep`.

    An N:M pattern has but one density N/M: here it is a share of the groups of M that keep N only, those that lose the
    least score; groups from which something was removed before (scores below 0) are the first, so that masks made from
    one another only shrink.
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
