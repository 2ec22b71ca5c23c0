"""The order of columns under N:M: the optimum of small cases, known optima of large ones, and every gain by recount."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import kept_score

from compress.numerics.sparse import permutation
from compress.numerics.sparse.masks import Pattern
from compress.numerics.sparse.permutation import (
    Distances,
    Stripes,
    SwapTable,
    count_partitions,
    divisions,
    group_size,
    mutual,
    search,
    thresholds,
)


def random(rows, width, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).abs()


def best_kept(score, n, m):
    """The most that any order keeps, by trying every division into stripes."""
    columns = range(score.shape[1])
    value = {
        subset: float(score[:, subset].topk(n, dim=1).values.double().sum()) for subset in combinations(columns, m)
    }

    def best(residual):
        if not residual:
            return 0.0
        first_result, remainder = residual[0], residual[1:]
        actual = []
        for alternatives in combinations(remainder, m - 1):
            actual.append(
                value[(first_result, *alternatives)] + best(tuple(c for c in remainder if c not in alternatives))
            )
        return max(actual)

    return best(tuple(columns))


@pytest.mark.parametrize(
    ("n", "m", "width"), [(1, 2, 8), (2, 4, 8), (1, 4, 8), (3, 4, 8), (2, 3, 9), (1, 3, 9), (2, 5, 10), (2, 4, 12)]
)
def test_small_cases_reach_the_optimum(n, m, width):
    for seed in range(3):
        score = random(6, width, seed) ** 2
        order, original, updated = search(score, n, m)
        assert original == pytest.approx(float(kept_score(score, n, m)))
        assert updated == pytest.approx(float(kept_score(score[:, order], n, m)))
        assert updated == pytest.approx(best_kept(score, n, m), rel=1e-6)
        assert updated > original or seed


@pytest.mark.parametrize("escapes", [0, 2])
def test_a_planted_optimum_is_found(escapes):
    """Half of the columns are zero, and they stand together: two in each stripe keep everything."""
    score = random(32, 256)
    score[:, 128:] = 0
    order, original, updated = search(score, 2, 4, escapes)
    assert updated == pytest.approx(float(score.sum(dtype=torch.float64)), rel=1e-9)
    assert original < 0.8 * updated
    assert (order.reshape(-1, 4) < 128).sum(1).tolist() == [2] * 64


def test_a_planted_optimum_that_rows_share_is_found():
    """The four large weights of each row stand in one stripe, which keeps one of them, until they are dealt out."""
    score = 0.001 * random(64, 64)
    for row in range(64):
        score[row, row % 16 * 4 : row % 16 * 4 + 4] += 1
    _, original, updated = search(score, 1, 4)
    total = float(score.sum(dtype=torch.float64))
    assert original < 0.3 * total and updated > 0.95 * total


@settings(max_examples=25)
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 70),
    m=st.integers(2, 9),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_any_search_gives_an_order_that_keeps_no_less(rows, width, m, data, seed):
    n = data.draw(st.integers(1, m - 1))
    score = random(rows, width, seed) * (random(1, width, seed + 1) > data.draw(st.sampled_from([0.0, 0.5, 9.0])))
    order, original, updated = search(score, n, m, escapes=data.draw(st.integers(0, 2)))
    full = width // m * m
    assert torch.equal(order.sort().values, torch.arange(width))
    assert order[full:].tolist() == list(range(full, width)), "the tail stays"
    assert original == pytest.approx(float(kept_score(score, n, m)), rel=1e-6)
    assert updated == pytest.approx(float(kept_score(score[:, order], n, m)), rel=1e-6)
    assert updated >= original
    keep = Pattern(f"{n}:{m}").keep(score[:, order], n / m)
    assert float((score[:, order] * keep).sum()) == pytest.approx(updated, rel=1e-5)


def test_equal_calls_give_equal_orders_and_nothing_to_gain_leaves_all_in_place():
    score = random(20, 64)
    assert torch.equal(search(score, 2, 4)[0], search(score.clone(), 2, 4)[0])
    for flat in (torch.zeros(5, 24), torch.ones(5, 24)):
        order, original, updated = search(flat, 2, 4)
        assert order.tolist() == list(range(24)) and original == updated


def test_wide_layers_are_searched_in_windows(monkeypatch):
    score, full = random(12, 88), search(random(12, 88), 2, 4)
    monkeypatch.setattr(permutation, "WINDOW", 34)  # 32 columns are whole stripes
    order, original, updated = search(score, 2, 4)
    assert [set(part.tolist()) for part in order.split(32)] == [set(range(s, min(s + 32, 88))) for s in (0, 32, 64)]
    assert original < updated <= full[2]
    assert updated == pytest.approx(float(kept_score(score[:, order], 2, 4)))


def test_escapes_go_on_from_local_optima():
    actual = [[search(random(48, 96, seed), 2, 4, escapes)[2] for escapes in (0, 1, 4)] for seed in range(2)]
    assert all(empty <= single <= four for empty, single, four in actual)
    assert all(empty < four for empty, _, four in actual)


def test_stripes_optimized_jointly_leave_local_optima(monkeypatch):
    """Three stripes of four are one group, for which the best of all 5775 ways is taken."""
    greedy = [search(random(5, 12, seed), 2, 4, escapes=0)[2] for seed in range(6)]
    monkeypatch.setattr(permutation, "regress", lambda table, draw: None)
    actual = [search(random(5, 12, seed), 2, 4, escapes=1)[2] for seed in range(6)]
    assert actual == [pytest.approx(best_kept(random(5, 12, seed), 2, 4), rel=1e-6) for seed in range(6)]
    assert any(original < updated * (1 - 1e-4) for original, updated in zip(greedy, actual, strict=True))


def test_bounded_regressions_leave_local_optima(monkeypatch):
    monkeypatch.setattr(permutation, "optimize_jointly", lambda stripes, draw: torch.zeros(0, dtype=torch.long))
    actual = [[search(random(24, 48, seed), 2, 4, escapes)[2] for escapes in (0, 12)] for seed in range(2)]
    assert all(empty <= subset for empty, subset in actual) and any(empty < subset for empty, subset in actual)


# ---- the table of swaps ----


def test_thresholds_are_what_must_be_exceeded_in_a_columns_place():
    stripe = torch.tensor([[4.0], [3.0], [2.0], [1.0]])[None]  # one row
    assert thresholds(stripe, 2)[0, :, 0].tolist() == [2.0, 2.0, 3.0, 3.0]
    assert thresholds(stripe, 1)[0, :, 0].tolist() == [3.0, 4.0, 4.0, 4.0]
    ties = torch.tensor([[1.0], [1.0], [1.0]])[None]
    assert thresholds(ties, 2)[0, :, 0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 3), (3, 5)])
def test_the_table_holds_the_best_swap_of_every_pair_of_stripes(n, m):
    stripes = Stripes(random(9, 4 * m).T.contiguous(), n, m)
    table = SwapTable(stripes, Distances(stripes.sampled, stripes.thresholds_of(stripes.order).flatten(0, 1)))
    changes = {}
    for a, b in combinations(range(4), 2):
        for i in range(m):
            for j in range(m):
                pair = stripes.order[[a, b]].clone()
                pair[0, i], pair[1, j] = pair[1, j].clone(), pair[0, i].clone()
                changes[a, b, i, j] = float(stripes.scores_of(pair).sum() - stripes.kept[[a, b]].sum())
        best = max(((i, j) for i in range(m) for j in range(m)), key=lambda at: changes[(a, b, *at)])
        assert float(table.gain[a, b]) == pytest.approx(changes[(a, b, *best)], abs=1e-4)
        assert float(table.gain[b, a]) == pytest.approx(float(table.gain[a, b]), rel=1e-4)
        assert table.at(torch.tensor([[a, b], [b, a]])).tolist() == [list(best), list(best[::-1])]


def test_only_what_changes_is_valued_anew():
    stripes = Stripes(random(9, 40).T.contiguous(), 2, 4)
    distances = Distances(stripes.sampled, stripes.thresholds_of(stripes.order).flatten(0, 1))
    table = SwapTable(stripes, distances)
    assert stripes.swap(torch.tensor([[2, 7]]), torch.tensor([[0, 3]]), force=True).tolist() == [True]
    table.refresh(torch.tensor([2, 7]))
    fresh = SwapTable(stripes, distances)
    torch.testing.assert_close(table.gain, fresh.gain)
    assert torch.equal(table.place[table.gain > -1e9], fresh.place[fresh.gain > -1e9])


def test_swaps_that_lose_are_not_made():
    score = torch.tensor([[9.0, 8, 1, 1, 9, 8, 1, 1]])
    stripes = Stripes(score.T.contiguous(), 2, 4)
    assert not stripes.swap(torch.tensor([[0, 1]]), torch.tensor([[0, 2]])).any()
    assert stripes.order.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and stripes.total == 34


def test_pairs_are_each_others_best():
    gain = torch.tensor([[0.0, 3, 1, 0], [3, 0, 4, 0], [1, 4, 0, 2], [0, 0, 2, 0]]).fill_diagonal_(-torch.inf)
    assert mutual(gain).tolist() == [[1, 2]]
    assert mutual(-gain.abs()).tolist() == []


def test_interpolated_distances_are_near_and_exact_between_different_knots(monkeypatch):
    x, t = random(50, 200, 1), random(30, 200, 2)
    exact = torch.cdist(t, x, p=1)
    assert torch.equal(Distances(x, t)(t), exact)
    monkeypatch.setattr(permutation, "EXACT", 0)
    distances = Distances(x, t)
    assert float((distances(t) - exact).abs().max()) < 0.05 * float(exact.mean())
    torch.testing.assert_close(distances(t, torch.tensor([4, 2])), distances(t)[:, [4, 2]])
    far = Distances(x + 10, t)  # every x beyond every t: the interpolation is linear
    torch.testing.assert_close(far(t), torch.cdist(t, x + 10, p=1), rtol=1e-4, atol=1e-2)


def test_the_search_is_as_good_with_interpolated_distances(monkeypatch):
    score = random(96, 128)
    exact = search(score, 2, 4, escapes=0)
    monkeypatch.setattr(permutation, "EXACT", 0)
    actual = search(score, 2, 4, escapes=0)
    gain = exact[2] - exact[1]
    assert actual[2] == pytest.approx(float(kept_score(score[:, actual[0]], 2, 4)))
    assert actual[2] - actual[1] > 0.9 * gain


@pytest.mark.parametrize(("size", "m", "count"), [(2, 4, 35), (3, 4, 5775), (5, 2, 945), (3, 3, 280)])
def test_divisions_are_all_there_are(size, m, count):
    subsets, ways = divisions(size, m)
    assert len(ways) == count_partitions(size, m) == count
    assert torch.equal(subsets[ways].flatten(1).sort().values, torch.arange(size * m).expand(count, -1))
    assert len({tuple(sorted(way)) for way in ways.tolist()}) == count


def test_groups_grow_as_long_as_there_are_not_too_many_ways():
    assert [group_size(m) for m in (2, 3, 4, 5, 8)] == [5, 3, 3, 2, 1]
