"""Which order of columns keeps the most under N:M: a greedy search over stripes of M columns with two escapes.

A stripe is M columns that stand together; which of its weights are kept depends on what columns are in it, not on
their order. Channels of stripes are swapped as long as that keeps more (Pool & Yu 2021, section 4), best swaps first.

Swaps are valued all at once. Let x_c be the scores of column c, [rows], and t_c, row by row, what a column must exceed
to be kept in c's place: the Nth largest of the M - 1 others of its stripe. In c's place column d keeps
sum(max(x_d - t_c, 0)) more than none does, which is half of |x_d - t_c| + x_d - t_c. What is linear cancels in a swap:

    gain(c, d) = (L[c, d] + L[d, c] - L[c, c] - L[d, d]) / 2,   L[c, d] = sum over rows of |x_d - t_c|

so that a table of L1 distances tells the gain of every swap there is, and a swap changes 2 M of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

EXACT = 1 << 22  # differences that are summed up one by one; more are interpolated
KNOTS = 6  # of the interpolation
LIKE = 128  # stripes that knots are fitted to
CHUNK = 1 << 23  # numbers of a temporary tensor
WINDOW = 4096  # columns that are searched together, which takes a table of WINDOW^2 numbers
TABLE_ROWS = 2048  # rows that swaps are valued on, evenly spaced; those that are made are measured on all
LEAST = 1e-7  # of what is kept: a gain below it is rounding
DRAFT_STRIPES = 16  # fewer are not drafted
PATIENCE, DRAFT_LEAST = 3, 5e-4  # drafts in a row that gain less than this share end them
REGRESSIONS = 1 / 16  # swaps that lose, per stripe
SUBSETS, PARTITIONS = 600, 6000  # of a group of stripes that is optimized jointly


def search(
    score: Float[Tensor, "rows in"], n: int, m: int, escapes: int = 2, seed: int = 0
) -> tuple[Int[Tensor, " in"], float, float]:
    """(order, kept before, kept after): column j is to be what column order[j] is now; the scores kept under n:m.

    score: at least 0. Never keeps less than before. Columns behind the last whole stripe stay where they are. escapes:
    how often the search goes on from a local optimum, each by some swaps that lose a little and by optimizing random
    groups of stripes jointly; what ends worse is taken back. seed: of what is drawn, on the CPU.
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
    """The `count` largest of m, the largest first, row by row: insertion, which is fast for the few that m is."""
    found: list[Tensor] = []
    for j in range(values.shape[-2]):
        value = values[..., j, :]
        for k, held in enumerate(found):
            found[k] = torch.maximum(held, value)
            value = torch.minimum(held, value)
        if len(found) < count:
            found.append(value)
    return found


def thresholds(stripes: Float[Tensor, "stripes m rows"], n: int) -> Float[Tensor, "stripes m rows"]:
    """What must be exceeded to be kept in a column's place: the nth largest of the others of its stripe."""
    *_, last, next_ = largest(stripes, n + 1)
    last, next_ = last[:, None], next_[:, None]
    return torch.where(stripes >= last, next_, last)  # without one of those that are kept, the next one is


class Distances:
    """L1 distances to the columns x, [in, rows]: exact where few are asked for, otherwise interpolated in t.

    Row by row, |x - t| is linear in t but for a kink at x. Between KNOTS values in each row it is interpolated, which
    is exact unless x and t fall between the same two. All distances are then one matrix product: the weights of the
    knots for each t, [a, rows * knots], times |x - knot|, [in, rows * knots], which is computed once.
    """

    def __init__(self, x: Float[Tensor, "in rows"], like: Float[Tensor, "some rows"]) -> None:
        """like: what t will be like; the knots are quantiles of it."""
        self.x = x
        share = torch.linspace(0, 1, KNOTS, device=x.device)
        self.knots = like.quantile(share, dim=0).T.contiguous()
        self.width = (self.knots[:, 1:] - self.knots[:, :-1]).clamp(min=1e-30)
        self.far = (x[..., None] - self.knots).abs_().flatten(1)

    def __call__(self, t: Float[Tensor, "a rows"], columns: Int[Tensor, " b"] | None = None) -> Float[Tensor, "a b"]:
        """The sum over rows of |x - t| for some columns, or all."""
        count = len(self.x) if columns is None else len(columns)
        if t.numel() * count <= EXACT:
            return torch.cdist(t, self.x if columns is None else self.x[columns], p=1)
        far = (self.far if columns is None else self.far[columns]).T
        return torch.cat([self._weights(part) @ far for part in t.split(max(1, CHUNK // far.shape[0]))])

    def _weights(self, t: Float[Tensor, "a rows"]) -> Float[Tensor, "a rows*knots"]:
        """What makes t of its two neighbours among the knots."""
        rise = t.unsqueeze(-1).sub(self.knots[:, :-1]).div_(self.width).clamp_(0, 1)  # of each interval: what t passed
        found = t.new_empty(*t.shape, KNOTS)
        found[..., 0], found[..., 1:] = 1, rise
        found[..., :-1] -= rise
        return found.flatten(1)


class Stripes:
    """Columns in stripes of m, of which n are kept in each row.

    order: the columns by stripe. kept: what each stripe keeps, on all rows.
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
        """What is kept."""
        return float(self.kept.sum())

    def measured(self, order: Int[Tensor, "stripes m"]) -> Float[Tensor, " stripes"]:
        """What stripes of these columns keep."""
        size = max(1, CHUNK // (self.m * self.columns.shape[1]))
        parts = [torch.stack(largest(self.columns[some], self.n)) for some in order.split(size)]
        return torch.cat([part.sum(-1, dtype=torch.float64).sum(0) for part in parts])

    def needed(self, order: Int[Tensor, "stripes m"]) -> Float[Tensor, "stripes m few"]:
        """The thresholds of the columns of some stripes, on a few rows."""
        size = max(1, CHUNK // (self.m * self.few.shape[1]))
        return torch.cat([thresholds(self.few[some], self.n) for some in order.split(size)])

    def put(self, which: Int[Tensor, " some"], order: Int[Tensor, "some m"], kept: Float[Tensor, " some"]) -> None:
        """Give some stripes other columns."""
        self.order[which], self.kept[which] = order, kept

    def swap(self, pairs: Int[Tensor, "pairs 2"], places: Int[Tensor, "pairs 2"], force: bool = False) -> Tensor:
        """Swap one column of each pair of stripes with one of the other, where that keeps more, or all (`force`).

        pairs: of stripes, each in one pair at most. Returns True for the pairs that were swapped.
        """
        new = self.order[pairs]  # [pairs, 2, m]
        each = torch.arange(len(pairs), device=pairs.device)
        one, other = new[each, 0, places[:, 0]], new[each, 1, places[:, 1]]
        new[each, 0, places[:, 0]], new[each, 1, places[:, 1]] = other, one
        return self.replace(pairs, new, force)

    def replace(
        self, groups: Int[Tensor, "groups size"], new: Int[Tensor, "groups size m"], force: bool = False
    ) -> Tensor:
        """Give groups of stripes new columns where that keeps more, or everywhere; returns True where it was done."""
        kept = self.measured(new.flatten(0, 1)).reshape(groups.shape)
        better = kept.sum(1) > self.kept[groups].sum(1) * (1 + LEAST)
        done = torch.ones_like(better) if force else better
        self.put(groups[done].flatten(), new[done].flatten(0, 1), kept[done].flatten())
        return done


def mutual(gain: Float[Tensor, "stripes stripes"]) -> Int[Tensor, "pairs 2"]:
    """Pairs of stripes of which each is the other's best, with a gain: doing the best first would do these, too."""
    value, best = gain.max(1)
    each = torch.arange(len(gain), device=gain.device)
    chosen = (best[best] == each) & (each < best) & (value > 0)
    return torch.stack((each[chosen], best[chosen]), 1)


def _draft(stripes: Stripes, distances: Distances, draw: torch.Generator) -> None:
    """Swaps among one column of each stripe, drawn anew each time: a table M^2 times smaller, while that gains much."""
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
    """The best swap of each pair of stripes, kept up to date for the stripes that change.

    gain: of the best swap of each pair. place: where its columns stand, as one number.
    """

    def __init__(self, stripes: Stripes, distances: Distances) -> None:
        self.stripes, self.distances = stripes, distances
        width, count = len(stripes.columns), len(stripes)
        self.far = stripes.few.new_empty(width, width)
        self.gain = stripes.few.new_empty(count, count)
        self.place = torch.zeros_like(self.gain, dtype=torch.int16)
        self.refresh(torch.arange(count, device=stripes.order.device))

    def refresh(self, changed: Int[Tensor, " some"]) -> None:
        """Value the swaps of some stripes anew."""
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
        """Where the columns of the best swap of each pair stand."""
        place = self.place[pairs[:, 0], pairs[:, 1]].long()
        return torch.stack((place // self.stripes.m, place % self.stripes.m), 1)

    def forbid(self, pairs: Int[Tensor, "pairs 2"]) -> None:
        """Leave the swaps of these pairs out until one of both stripes changes."""
        self.gain[pairs[:, 0], pairs[:, 1]] = -torch.inf
        self.gain[pairs[:, 1], pairs[:, 0]] = -torch.inf

    def climb(self) -> None:
        """Swap as long as that keeps more."""
        while len(pairs := mutual(self.gain)):
            made = self.stripes.swap(pairs, self.at(pairs))
            self.refresh(pairs[made].flatten())
            self.forbid(pairs[~made])

    def restore(self, order: Int[Tensor, "stripes m"], kept: Float[Tensor, " stripes"]) -> None:
        """Take the stripes back to how they were."""
        changed = (self.stripes.order != order).any(1).nonzero()[:, 0]
        self.stripes.put(changed, order[changed], kept[changed])
        self.refresh(changed)


def _optimize(stripes: Stripes, escapes: int, draw: torch.Generator) -> None:
    """Climb, and go on from local optima."""
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
    """Make some swaps that lose little, climb without taking them back, then climb with that allowed."""
    loss = -table.gain
    usual = loss[loss < torch.inf].median() if len(loss) > 1 else loss.new_ones(())
    chance = torch.rand(loss.shape, generator=draw).to(loss)  # another choice after each escape that was taken back
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
    """Divide the columns of random groups of stripes anew, in the best way there is; returns those that changed."""
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
    """How many stripes of m are optimized jointly: as many as there are not too many ways for."""
    size = 1
    while math.comb((size + 1) * m, m) <= SUBSETS and ways_count(size + 1, m) <= PARTITIONS:
        size += 1
    return size


def ways_count(size: int, m: int) -> int:
    """In how many ways size * m columns can be divided into stripes of m."""
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
