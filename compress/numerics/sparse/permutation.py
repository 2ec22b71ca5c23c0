"""The column order that keeps the most under N:M: a greedy search over stripes of M columns with two escapes.

A stripe is M adjacent columns. Its mask depends on which columns it holds, not on their order. Columns are swapped
between stripes while this increases the kept score (Pool & Yu 2021, section 4), best swaps first.

The gains of all swaps are computed at once. Let x_c be the scores of column c, [rows], and t_c the threshold per row
that a column must exceed to remain in place of c: the Nth largest of the M - 1 others of its stripe. In that place,
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
KNOT_STRIPES = 128  # stripes that the knots are fitted to
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
    """Search a column order that keeps more score under n:m.

    The result never keeps less than the original order. Columns after the last complete stripe do not move.

    Args:
        score: at least 0.
        n: columns of a stripe that remain in each row.
        m: columns of a stripe.
        escapes: how often the search leaves a local optimum, each time with some swaps of small loss and a joint
            optimization of random groups of stripes; an escape that ends worse is undone.
        seed: seed of the random choices, on the CPU.

    Returns:
        (order, old score, new score). New column j is old column order[j]. A score is the sum of the scores that remain
        under n:m.
    """
    width = score.shape[1] // m * m
    order = torch.arange(score.shape[1], device=score.device)
    scores = [float(score[:, width:].sum())] * 2
    generator = torch.Generator().manual_seed(seed)
    for window in order[:width].clone().split(max(WINDOW // m, 1) * m):
        stripes = Stripes(score[:, window].T.float().contiguous(), n, m)
        scores[0] += stripes.total
        _optimize(stripes, escapes, generator)
        scores[1] += stripes.total
        sorted_stripes = stripes.order.sort(1).values
        order[window] = window[sorted_stripes[sorted_stripes[:, 0].argsort()].flatten()]
    return order, scores[0], scores[1]


def largest(values: Float[Tensor, "*batch m rows"], count: int) -> list[Float[Tensor, "*batch rows"]]:
    """Return the `count` largest of m values per row, in descending order: insertion, which is fast for small m."""
    highest: list[Tensor] = []
    for j in range(values.shape[-2]):
        value = values[..., j, :]
        for k, current in enumerate(highest):
            highest[k] = torch.maximum(current, value)
            value = torch.minimum(current, value)
        if len(highest) < count:
            highest.append(value)
    return highest


def thresholds(stripes: Float[Tensor, "stripes m rows"], n: int) -> Float[Tensor, "stripes m rows"]:
    """Return the threshold that replaces each column: the nth largest of the other columns of its stripe."""
    *_, nth, next_highest = largest(stripes, n + 1)
    nth, next_highest = nth[:, None], next_highest[:, None]
    return torch.where(stripes >= nth, next_highest, nth)  # without the column, the next one remains


class Distances:
    """L1 distances to the columns x, [in, rows]: exact for few distances, otherwise interpolated in t.

    Row by row, |x - t| is linear in t except for a kink at x. It is interpolated between KNOTS values per row, which
    is exact unless x and t fall into the same interval. All distances are then one matrix product: the weights of the
    knots for each t, [a, rows * knots], times |x - knot|, [in, rows * knots], which is computed once.

    Args:
        x: the columns.
        sample: a sample of the distribution of t; the knots are its quantiles.
    """

    def __init__(self, x: Float[Tensor, "in rows"], sample: Float[Tensor, "some rows"]) -> None:
        """like: a sample of the distribution of t; the knots are its quantiles."""
        self.x = x
        fractions = torch.linspace(0, 1, KNOTS, device=x.device)
        self.knots = sample.quantile(fractions, dim=0).T.contiguous()
        self.width = (self.knots[:, 1:] - self.knots[:, :-1]).clamp(min=1e-30)
        self.far = (x[..., None] - self.knots).abs_().flatten(1)

    def __call__(self, t: Float[Tensor, "a rows"], columns: Int[Tensor, " b"] | None = None) -> Float[Tensor, "a b"]:
        """Sum |x - t| over rows, for the columns with these indices, or all columns."""
        count = len(self.x) if columns is None else len(columns)
        if t.numel() * count <= EXACT:
            return torch.cdist(t, self.x if columns is None else self.x[columns], p=1)
        far = (self.far if columns is None else self.far[columns]).T
        return torch.cat([self._weights(part) @ far for part in t.split(max(1, CHUNK // far.shape[0]))])

    def _weights(self, t: Float[Tensor, "a rows"]) -> Float[Tensor, "a rows*knots"]:
        """Return the weights of the knots that interpolate t."""
        rise = (
            t.unsqueeze(-1).sub(self.knots[:, :-1]).div_(self.width).clamp_(0, 1)
        )  # fraction of each interval below t
        weights = t.new_empty(*t.shape, KNOTS)
        weights[..., 0], weights[..., 1:] = 1, rise
        weights[..., :-1] -= rise
        return weights.flatten(1)


class Stripes:
    """Columns in stripes of m, of which n remain in each row.

    Attributes:
        columns: scores of the columns.
        sampled: the scores on the rows of the swap table.
        order: the columns of each stripe.
        kept: the score that each stripe keeps, over all rows.
    """

    def __init__(self, columns: Float[Tensor, "in rows"], n: int, m: int) -> None:
        self.columns, self.n, self.m = columns, n, m
        self.sampled = columns[:, :: -(-columns.shape[1] // TABLE_ROWS)].contiguous()
        self.order = torch.arange(len(columns), device=columns.device).reshape(-1, m)
        self.kept = self.scores_of(self.order)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def total(self) -> float:
        """The total score that remains."""
        return float(self.kept.sum())

    def scores_of(self, order: Int[Tensor, "stripes m"]) -> Float[Tensor, " stripes"]:
        """Return the scores that stripes of these columns keep."""
        size = max(1, CHUNK // (self.m * self.columns.shape[1]))
        parts = [torch.stack(largest(self.columns[part], self.n)) for part in order.split(size)]
        return torch.cat([part.sum(-1, dtype=torch.float64).sum(0) for part in parts])

    def thresholds_of(self, order: Int[Tensor, "stripes m"]) -> Float[Tensor, "stripes m sampled"]:
        """Return the thresholds of the columns of stripes, on the rows of the table."""
        size = max(1, CHUNK // (self.m * self.sampled.shape[1]))
        return torch.cat([thresholds(self.sampled[part], self.n) for part in order.split(size)])

    def assign(
        self, indices: Int[Tensor, " some"], order: Int[Tensor, "some m"], scores: Float[Tensor, " some"]
    ) -> None:
        """Replace the columns of the stripes with these indices."""
        self.order[indices], self.kept[indices] = order, scores

    def swap(self, pairs: Int[Tensor, "pairs 2"], places: Int[Tensor, "pairs 2"], force: bool = False) -> Tensor:
        """Swap one column between the two stripes of each pair if this keeps more score, or always.

        Args:
            pairs: pairs of stripes, each stripe in at most one pair.
            places: positions of the two columns in their stripes.
            force: whether to swap even with a loss.

        Returns:
            True for the pairs that were swapped.
        """
        new_order = self.order[pairs]  # [pairs, 2, m]
        pair_index = torch.arange(len(pairs), device=pairs.device)
        left, right = new_order[pair_index, 0, places[:, 0]], new_order[pair_index, 1, places[:, 1]]
        new_order[pair_index, 0, places[:, 0]], new_order[pair_index, 1, places[:, 1]] = right, left
        return self.replace(pairs, new_order, force)

    def replace(
        self, groups: Int[Tensor, "groups size"], new_order: Int[Tensor, "groups size m"], force: bool = False
    ) -> Tensor:
        """Replace the columns of groups of stripes if this keeps more score, or always.

        Returns:
            True for the groups that were replaced.
        """
        scores = self.scores_of(new_order.flatten(0, 1)).reshape(groups.shape)
        is_better = scores.sum(1) > self.kept[groups].sum(1) * (1 + LEAST)
        is_replaced = torch.ones_like(is_better) if force else is_better
        self.assign(groups[is_replaced].flatten(), new_order[is_replaced].flatten(0, 1), scores[is_replaced].flatten())
        return is_replaced


def mutual(gain: Float[Tensor, "stripes stripes"]) -> Int[Tensor, "pairs 2"]:
    """Return the pairs of stripes that are each other's best with a gain.

    Choosing the best pair first would choose them too.
    """
    value, best = gain.max(1)
    index = torch.arange(len(gain), device=gain.device)
    is_chosen = (best[best] == index) & (index < best) & (value > 0)
    return torch.stack((index[is_chosen], best[is_chosen]), 1)


def _draft(stripes: Stripes, distances: Distances, generator: torch.Generator) -> None:
    """Swap within one random column per stripe, while that gains much; the table is M^2 times smaller."""
    rounds_without_gain, index = 0, torch.arange(len(stripes), device=stripes.order.device)
    while rounds_without_gain < PATIENCE and len(stripes) > DRAFT_STRIPES:
        place = torch.randint(stripes.m, (len(stripes),), generator=generator).to(index.device)
        old_total = stripes.total
        distance = distances(stripes.thresholds_of(stripes.order)[index, place], stripes.order[index, place])
        diagonal = distance.diagonal()
        gain = (distance + distance.T - diagonal - diagonal[:, None]) / 2
        while len(pairs := mutual(gain)):
            stripes.swap(pairs, place[pairs])
            gain[pairs.flatten()] = -torch.inf
            gain[:, pairs.flatten()] = -torch.inf
        rounds_without_gain = rounds_without_gain + 1 if stripes.total <= old_total * (1 + DRAFT_LEAST) else 0


class SwapTable:
    """The best swap of each pair of stripes, updated for the stripes that change.

    Attributes:
        gain: gain of the best swap of each pair.
        place: positions of its two columns, encoded as one number.
    """

    def __init__(self, stripes: Stripes, distances: Distances) -> None:
        self.stripes, self.distances = stripes, distances
        width, count = len(stripes.columns), len(stripes)
        self.far = stripes.sampled.new_empty(width, width)
        self.gain = stripes.sampled.new_empty(count, count)
        self.place = torch.zeros_like(self.gain, dtype=torch.int16)
        self.refresh(torch.arange(count, device=stripes.order.device))

    def refresh(self, changed: Int[Tensor, " some"]) -> None:
        """Recompute the gains of the swaps of these stripes."""
        for part in changed.split(max(1, CHUNK // self.distances.far.shape[1])):
            order = self.stripes.order[part]
            self.far[order.flatten()] = self.distances(self.stripes.thresholds_of(order).flatten(0, 1))
        for part in changed.split(max(1, CHUNK // (self.stripes.m * len(self.far)))):
            self._value(part)

    def _value(self, stripes: Int[Tensor, " some"]) -> None:
        count, m = self.stripes.order.shape
        rows, columns = self.stripes.order[stripes].flatten(), self.stripes.order.flatten()
        diagonal = self.far.diagonal()
        gain = (self.far[rows] + self.far[:, rows].T - diagonal - diagonal[rows, None])[:, columns] / 2
        gain = gain.reshape(len(stripes), m, count, m)
        best_of_row, other_position = gain.max(3)  # [some, m, count]
        best, position = best_of_row.max(1)
        other_position = other_position.gather(1, position[:, None])[:, 0]
        best[torch.arange(len(stripes), device=stripes.device), stripes] = -torch.inf
        self.gain[stripes], self.gain[:, stripes] = best, best.T
        self.place[stripes] = (position * m + other_position).to(torch.int16)
        self.place[:, stripes] = (other_position * m + position).T.to(torch.int16)

    def at(self, pairs: Int[Tensor, "pairs 2"]) -> Int[Tensor, "pairs 2"]:
        """Return the positions of the two columns of the best swap of each pair."""
        place = self.place[pairs[:, 0], pairs[:, 1]].long()
        return torch.stack((place // self.stripes.m, place % self.stripes.m), 1)

    def forbid(self, pairs: Int[Tensor, "pairs 2"]) -> None:
        """Exclude the swaps of these pairs until one of their stripes changes."""
        self.gain[pairs[:, 0], pairs[:, 1]] = -torch.inf
        self.gain[pairs[:, 1], pairs[:, 0]] = -torch.inf

    def climb(self) -> None:
        """Swap as long as this keeps more score."""
        while len(pairs := mutual(self.gain)):
            is_swapped = self.stripes.swap(pairs, self.at(pairs))
            self.refresh(pairs[is_swapped].flatten())
            self.forbid(pairs[~is_swapped])

    def restore(self, order: Int[Tensor, "stripes m"], scores: Float[Tensor, " stripes"]) -> None:
        """Restore the stripes to an earlier state."""
        changed = (self.stripes.order != order).any(1).nonzero()[:, 0]
        self.stripes.assign(changed, order[changed], scores[changed])
        self.refresh(changed)


def _optimize(stripes: Stripes, escapes: int, generator: torch.Generator) -> None:
    """Climb to a local optimum, then escape and climb again."""
    if len(stripes) < 2:
        return
    sample = stripes.order[:: -(-len(stripes) // KNOT_STRIPES)]
    distances = Distances(stripes.sampled, stripes.thresholds_of(sample).flatten(0, 1))
    _draft(stripes, distances, generator)
    table = SwapTable(stripes, distances)
    table.climb()
    for _ in range(escapes):
        best_state = stripes.order.clone(), stripes.kept.clone()
        table.refresh(optimize_jointly(stripes, generator))
        table.climb()
        regress(table, generator)
        if stripes.total <= float(best_state[1].sum()):
            table.restore(*best_state)


def regress(table: SwapTable, generator: torch.Generator) -> None:
    """Make some swaps of small loss and climb, first with these pairs excluded, then with them allowed."""
    loss = -table.gain
    median_loss = loss[loss < torch.inf].median() if len(loss) > 1 else loss.new_ones(())
    noise = torch.rand(loss.shape, generator=generator).to(loss)  # a different choice after an escape that was undone
    pairs = mutual((noise + noise.T) * torch.exp(-loss / median_loss.clamp(min=1e-30)))
    if not len(pairs):
        return
    max_swaps = max(1, int(len(loss) * REGRESSIONS))
    pairs = pairs[loss[pairs[:, 0], pairs[:, 1]].argsort()[:max_swaps]]
    table.stripes.swap(pairs, table.at(pairs), force=True)
    for is_allowed in (False, True):
        table.refresh(pairs.flatten())
        if not is_allowed:
            table.forbid(pairs)
        table.climb()


def optimize_jointly(stripes: Stripes, generator: torch.Generator) -> Int[Tensor, " changed"]:
    """Divide the columns of random groups of stripes again in the best way; return the stripes that changed."""
    size = min(group_size(stripes.m), len(stripes))
    groups = torch.randperm(len(stripes), generator=generator)[: len(stripes) // size * size].reshape(-1, size)
    groups = groups.to(stripes.order.device)
    if size < 2:
        return groups[:0].flatten()
    subsets, partitions = (table.to(groups.device) for table in divisions(size, stripes.m))
    step = max(1, CHUNK // (len(subsets) * stripes.m))
    new_orders = []
    for columns in stripes.order[groups].flatten(1):
        value = torch.zeros(len(subsets), device=groups.device)
        for x in stripes.sampled[columns].split(step, 1):
            value += sum(highest.sum(-1) for highest in largest(x[subsets], stripes.n))
        new_orders.append(columns[subsets[partitions[value[partitions].sum(1).argmax()]]])
    return groups[stripes.replace(groups, torch.stack(new_orders))].flatten()


@cache
def group_size(m: int) -> int:
    """Return the number of stripes of m that are optimized jointly: the largest within the limits."""
    size = 1
    while math.comb((size + 1) * m, m) <= SUBSETS and count_partitions(size + 1, m) <= PARTITIONS:
        size += 1
    return size


def count_partitions(size: int, m: int) -> int:
    """Return the number of ways to divide size * m columns into stripes of m."""
    return math.factorial(size * m) // math.factorial(m) ** size // math.factorial(size)


@cache
def divisions(size: int, m: int) -> tuple[Int[Tensor, "subsets m"], Int[Tensor, "ways size"]]:
    """Return all subsets of m of size * m columns, and all ways to divide the columns into `size` of them."""
    subsets = list(combinations(range(size * m), m))
    index_of_subset = {subset: i for i, subset in enumerate(subsets)}

    def divided(columns: Sequence[int]) -> list[list[int]]:
        if not columns:
            return [[]]
        first_column, *other_columns = columns
        partitions = []
        for companions in combinations(other_columns, m - 1):
            remaining = [column for column in other_columns if column not in companions]
            partitions += [
                [index_of_subset[(first_column, *companions)], *partition] for partition in divided(remaining)
            ]
        return partitions

    return torch.tensor(subsets), torch.tensor(divided(range(size * m)))
