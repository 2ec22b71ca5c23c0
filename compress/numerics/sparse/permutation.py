"""The column order that keeps the most under N:M: a greedy search over stripes of M columns with two escapes.

A stripe is M adjacent columns. Its mask depends on which columns it holds, not on their order. Columns are swapped
between stripes while this increases the kept score (Pool & Yu 2021, section 4), best swaps first.

The gains of all swaps are computed at once. Let x_c be the scores of column c, [rows], and t_c the threshold per row
that a column must exceed to be kept in place of c: the Nth largest of the M - 1 others of its stripe. In that place,
column d adds sum(max(x_d - t_c, 0)) to the kept score, which is half of |x_d - t_c| + x_d - t_c. The linear terms
cancel in a swap:

    gain(c, d) = (L[c, d] + L[d, c] - L[c, c] - L[d, d]) / 2,   L[c, d] = sum over rows of |x_d - t_c|

A table of L1 distances therefore gives the gain of every possible swap, and a swap changes 2 M of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

EXACT = 1 << 22  # up to so many differences are summed exactly; more are interpolated
KNOTS = 6  # of the interpolation
LIKE = 128  # stripes that the knots are fitted to
CHUNK = 1 << 23  # elements of a temporary tensor
WINDOW = 4096  # columns that are searched together; their table has WINDOW^2 elements
TABLE_ROWS = 2048  # rows, evenly spaced, on which gains are estimated; swaps that are made are measured on all rows
LEAST = 1e-7  # relative to the kept score: a smaller gain is rounding error
DRAFT_STRIPES = 16  # with fewer stripes there is no draft
PATIENCE, DRAFT_LEAST = 3, 5e-4  # the draft ends after so many consecutive rounds with a smaller relative gain
REGRESSIONS = 1 / 16  # swaps with a loss, per stripe
SUBSETS, PARTITIONS = 600, 6000  # limits for a group of stripes that is optimized jointly


def search(
    score: Float[Tensor, "rows in"], n: int, m: int, escapes: int = 2, seed: int = 0
) -> tuple[Int[Tensor, " in"], float, float]:
    """(order, kept before, kept after): new column j is old column order[j]; kept is the sum of scores kept under n:m.

    score: at least 0. The result never keeps less than before. Columns after the last whole stripe do not move.
    escapes: how often the search leaves a local optimum, each time with some swaps of small loss and a joint
    optimization of random groups of stripes; an escape that ends worse is undone. seed: of the random choices, on the
    CPU.
    """
    width = score.shape[1] // m * m
    order = torch.arange(score.shape[1], device=score.device)
    kept = [float(score[:, width:].sum())] * 2
    draw = torch.Generator().manual_seed(seed)
    for window in order[:width].clone().split(max(WINDOW // m, 1) * m):
        stripes = Stripes(score[:, window].T.float().contiguous(), n, m)
        kept[0] += stripes.total
        _optimize(stripes, escapes, draw)
        kept[1] += stripes.total
        placed = stripes.order.sort(1).values
        order[window] = window[placed[placed[:, 0].argsort()].flatten()]
    return order, kept[0], kept[1]


def largest(values: Float[Tensor, "*batch m rows"], count: int) -> list[Float[Tensor, "*batch rows"]]:
    """The `count` largest of m per row, in descending order: insertion, which is fast for small m."""
    found: list[Tensor] = []
    for j in range(values.shape[-2]):
        value = values[..., j, :]
        for k, kept in enumerate(found):
            found[k] = torch.maximum(kept, value)
            value = torch.minimum(kept, value)
        if len(found) < count:
            found.append(value)
    return found


def thresholds(stripes: Float[Tensor, "stripes m rows"], n: int) -> Float[Tensor, "stripes m rows"]:
    """The thresholds that replace each column: the nth largest of the other columns of its stripe."""
    *_, last, next_ = largest(stripes, n + 1)
    last, next_ = last[:, None], next_[:, None]
    return torch.where(stripes >= last, next_, last)  # without a kept column, the next one is kept


class Distances:
    """L1 distances to the columns x, [in, rows]: exact for few distances, otherwise interpolated in t.

    Row by row, |x - t| is linear in t except for a kink at x. It is interpolated between KNOTS values per row, which
    is exact unless x and t fall into the same interval. All distances are then one matrix product: the weights of the
    knots for each t, [a, rows * knots], times |x - knot|, [in, rows * knots], which is computed once.
    """

    def __init__(self, x: Float[Tensor, "in rows"], like: Float[Tensor, "some rows"]) -> None:
        """like: a sample of the distribution of t; the knots are its quantiles."""
        self.x = x
        fractions = torch.linspace(0, 1, KNOTS, device=x.device)
        self.knots = like.quantile(fractions, dim=0).T.contiguous()
        self.width = (self.knots[:, 1:] - self.knots[:, :-1]).clamp(min=1e-30)
        self.far = (x[..., None] - self.knots).abs_().flatten(1)

    def __call__(self, t: Float[Tensor, "a rows"], columns: Int[Tensor, " b"] | None = None) -> Float[Tensor, "a b"]:
        """The sum over rows of |x - t|, for some columns or all."""
        count = len(self.x) if columns is None else len(columns)
        if t.numel() * count <= EXACT:
            return torch.cdist(t, self.x if columns is None else self.x[columns], p=1)
        far = (self.far if columns is None else self.far[columns]).T
        return torch.cat([self._weights(part) @ far for part in t.split(max(1, CHUNK // far.shape[0]))])

    def _weights(self, t: Float[Tensor, "a rows"]) -> Float[Tensor, "a rows*knots"]:
        """The weights of the knots that interpolate t."""
        rise = (
            t.unsqueeze(-1).sub(self.knots[:, :-1]).div_(self.width).clamp_(0, 1)
        )  # fraction of each interval below t
        weights = t.new_empty(*t.shape, KNOTS)
        weights[..., 0], weights[..., 1:] = 1, rise
        weights[..., :-1] -= rise
        return weights.flatten(1)


class Stripes:
    """Columns in stripes of m, of which n are kept in each row.

    order: the columns of each stripe. kept: the score that each stripe keeps, over all rows.
    """

    def __init__(self, columns: Float[Tensor, "in rows"], n: int, m: int) -> None:
        self.columns, self.n, self.m = columns, n, m
        self.few = columns[:, :: -(-columns.shape[1] // TABLE_ROWS)].contiguous()
        self.order = torch.arange(len(columns), device=columns.device).reshape(-1, m)
        self.kept = self.measured(self.order)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def total(self) -> float:
        """The total score that is kept."""
        return float(self.kept.sum())

    def measured(self, order: Int[Tensor, "stripes m"]) -> Float[Tensor, " stripes"]:
        """The scores that stripes of these columns keep."""
        size = max(1, CHUNK // (self.m * self.columns.shape[1]))
        parts = [torch.stack(largest(self.columns[some], self.n)) for some in order.split(size)]
        return torch.cat([part.sum(-1, dtype=torch.float64).sum(0) for part in parts])

    def needed(self, order: Int[Tensor, "stripes m"]) -> Float[Tensor, "stripes m few"]:
        """The thresholds of the columns of some stripes, on the rows of the table."""
        size = max(1, CHUNK // (self.m * self.few.shape[1]))
        return torch.cat([thresholds(self.few[some], self.n) for some in order.split(size)])

    def put(self, which: Int[Tensor, " some"], order: Int[Tensor, "some m"], kept: Float[Tensor, " some"]) -> None:
        """Replace the columns of some stripes."""
        self.order[which], self.kept[which] = order, kept

    def swap(self, pairs: Int[Tensor, "pairs 2"], places: Int[Tensor, "pairs 2"], force: bool = False) -> Tensor:
        """Swap one column between the two stripes of each pair, where this keeps more, or always (`force`).

        pairs: of stripes, each stripe in at most one pair. Returns True for the pairs that were swapped.
        """
        new = self.order[pairs]  # [pairs, 2, m]
        each = torch.arange(len(pairs), device=pairs.device)
        first, second = new[each, 0, places[:, 0]], new[each, 1, places[:, 1]]
        new[each, 0, places[:, 0]], new[each, 1, places[:, 1]] = second, first
        return self.replace(pairs, new, force)

    def replace(
        self, groups: Int[Tensor, "groups size"], new: Int[Tensor, "groups size m"], force: bool = False
    ) -> Tensor:
        """Replace the columns of groups of stripes where this keeps more, or always; True where they were replaced."""
        kept = self.measured(new.flatten(0, 1)).reshape(groups.shape)
        better = kept.sum(1) > self.kept[groups].sum(1) * (1 + LEAST)
        done = torch.ones_like(better) if force else better
        self.put(groups[done].flatten(), new[done].flatten(0, 1), kept[done].flatten())
        return done


def mutual(gain: Float[Tensor, "stripes stripes"]) -> Int[Tensor, "pairs 2"]:
    """Pairs of stripes that are each other's best, with a gain; taking the best pair first would choose them too."""
    value, best = gain.max(1)
    each = torch.arange(len(gain), device=gain.device)
    chosen = (best[best] == each) & (each < best) & (value > 0)
    return torch.stack((each[chosen], best[chosen]), 1)


def _draft(stripes: Stripes, distances: Distances, draw: torch.Generator) -> None:
    """Swap among one random column per stripe, while that gains much; the table is M^2 times smaller."""
    calm, each = 0, torch.arange(len(stripes), device=stripes.order.device)
    while calm < PATIENCE and len(stripes) > DRAFT_STRIPES:
        place = torch.randint(stripes.m, (len(stripes),), generator=draw).to(each.device)
        before = stripes.total
        far = distances(stripes.needed(stripes.order)[each, place], stripes.order[each, place])
        own = far.diagonal()
        gain = (far + far.T - own - own[:, None]) / 2
        while len(pairs := mutual(gain)):
            stripes.swap(pairs, place[pairs])
            gain[pairs.flatten()] = -torch.inf
            gain[:, pairs.flatten()] = -torch.inf
        calm = calm + 1 if stripes.total <= before * (1 + DRAFT_LEAST) else 0


class Table:
    """The best swap of each pair of stripes, updated for the stripes that change.

    gain: of the best swap of each pair. place: the positions of its two columns, encoded as one number.
    """

    def __init__(self, stripes: Stripes, distances: Distances) -> None:
        self.stripes, self.distances = stripes, distances
        width, count = len(stripes.columns), len(stripes)
        self.far = stripes.few.new_empty(width, width)
        self.gain = stripes.few.new_empty(count, count)
        self.place = torch.zeros_like(self.gain, dtype=torch.int16)
        self.refresh(torch.arange(count, device=stripes.order.device))

    def refresh(self, changed: Int[Tensor, " some"]) -> None:
        """Recompute the gains of the swaps of some stripes."""
        for some in changed.split(max(1, CHUNK // self.distances.far.shape[1])):
            order = self.stripes.order[some]
            self.far[order.flatten()] = self.distances(self.stripes.needed(order).flatten(0, 1))
        for some in changed.split(max(1, CHUNK // (self.stripes.m * len(self.far)))):
            self._value(some)

    def _value(self, some: Int[Tensor, " some"]) -> None:
        count, m = self.stripes.order.shape
        rows, columns = self.stripes.order[some].flatten(), self.stripes.order.flatten()
        own = self.far.diagonal()
        gain = (self.far[rows] + self.far[:, rows].T - own - own[rows, None])[:, columns] / 2
        gain = gain.reshape(len(some), m, count, m)
        over, there = gain.max(3)  # [some, m, count]
        best, here = over.max(1)
        there = there.gather(1, here[:, None])[:, 0]
        best[torch.arange(len(some), device=some.device), some] = -torch.inf
        self.gain[some], self.gain[:, some] = best, best.T
        self.place[some] = (here * m + there).to(torch.int16)
        self.place[:, some] = (there * m + here).T.to(torch.int16)

    def at(self, pairs: Int[Tensor, "pairs 2"]) -> Int[Tensor, "pairs 2"]:
        """The positions of the two columns of the best swap of each pair."""
        place = self.place[pairs[:, 0], pairs[:, 1]].long()
        return torch.stack((place // self.stripes.m, place % self.stripes.m), 1)

    def forbid(self, pairs: Int[Tensor, "pairs 2"]) -> None:
        """Exclude the swaps of these pairs until one of their stripes changes."""
        self.gain[pairs[:, 0], pairs[:, 1]] = -torch.inf
        self.gain[pairs[:, 1], pairs[:, 0]] = -torch.inf

    def climb(self) -> None:
        """Swap while this keeps more."""
        while len(pairs := mutual(self.gain)):
            made = self.stripes.swap(pairs, self.at(pairs))
            self.refresh(pairs[made].flatten())
            self.forbid(pairs[~made])

    def restore(self, order: Int[Tensor, "stripes m"], kept: Float[Tensor, " stripes"]) -> None:
        """Restore the stripes to an earlier state."""
        changed = (self.stripes.order != order).any(1).nonzero()[:, 0]
        self.stripes.put(changed, order[changed], kept[changed])
        self.refresh(changed)


def _optimize(stripes: Stripes, escapes: int, draw: torch.Generator) -> None:
    """Climb to a local optimum, then escape and climb again."""
    if len(stripes) < 2:
        return
    sample = stripes.order[:: -(-len(stripes) // LIKE)]
    distances = Distances(stripes.few, stripes.needed(sample).flatten(0, 1))
    _draft(stripes, distances, draw)
    table = Table(stripes, distances)
    table.climb()
    for _ in range(escapes):
        best = stripes.order.clone(), stripes.kept.clone()
        table.refresh(divide_jointly(stripes, draw))
        table.climb()
        regress(table, draw)
        if stripes.total <= float(best[1].sum()):
            table.restore(*best)


def regress(table: Table, draw: torch.Generator) -> None:
    """Make some swaps of small loss and climb, first with these pairs excluded, then with them allowed."""
    loss = -table.gain
    usual = loss[loss < torch.inf].median() if len(loss) > 1 else loss.new_ones(())
    chance = torch.rand(loss.shape, generator=draw).to(loss)  # a different choice after an escape that was undone
    pairs = mutual((chance + chance.T) * torch.exp(-loss / usual.clamp(min=1e-30)))
    if not len(pairs):
        return
    most = max(1, int(len(loss) * REGRESSIONS))
    pairs = pairs[loss[pairs[:, 0], pairs[:, 1]].argsort()[:most]]
    table.stripes.swap(pairs, table.at(pairs), force=True)
    for allowed in (False, True):
        table.refresh(pairs.flatten())
        if not allowed:
            table.forbid(pairs)
        table.climb()


def divide_jointly(stripes: Stripes, draw: torch.Generator) -> Int[Tensor, " changed"]:
    """Divide the columns of random groups of stripes anew, in the best way; return the stripes that changed."""
    size = min(group_size(stripes.m), len(stripes))
    groups = torch.randperm(len(stripes), generator=draw)[: len(stripes) // size * size].reshape(-1, size)
    groups = groups.to(stripes.order.device)
    if size < 2:
        return groups[:0].flatten()
    subsets, ways = (table.to(groups.device) for table in divisions(size, stripes.m))
    step = max(1, CHUNK // (len(subsets) * stripes.m))
    found = []
    for columns in stripes.order[groups].flatten(1):
        value = torch.zeros(len(subsets), device=groups.device)
        for x in stripes.few[columns].split(step, 1):
            value += sum(top.sum(-1) for top in largest(x[subsets], stripes.n))
        found.append(columns[subsets[ways[value[ways].sum(1).argmax()]]])
    return groups[stripes.replace(groups, torch.stack(found))].flatten()


@cache
def group_size(m: int) -> int:
    """The number of stripes of m that are optimized jointly: the largest within the limits."""
    size = 1
    while math.comb((size + 1) * m, m) <= SUBSETS and ways_count(size + 1, m) <= PARTITIONS:
        size += 1
    return size


def ways_count(size: int, m: int) -> int:
    """The number of ways to divide size * m columns into stripes of m."""
    return math.factorial(size * m) // math.factorial(m) ** size // math.factorial(size)


@cache
def divisions(size: int, m: int) -> tuple[Int[Tensor, "subsets m"], Int[Tensor, "ways size"]]:
    """All subsets of m of size * m columns, and all ways to divide the columns into `size` of them."""
    subsets = list(combinations(range(size * m), m))
    number = {subset: i for i, subset in enumerate(subsets)}

    def divided(left: Sequence[int]) -> list[list[int]]:
        if not left:
            return [[]]
        first, *rest = left
        found = []
        for others in combinations(rest, m - 1):
            remaining = [column for column in rest if column not in others]
            found += [[number[(first, *others)], *way] for way in divided(remaining)]
        return found

    return torch.tensor(subsets), torch.tensor(divided(range(size * m)))
