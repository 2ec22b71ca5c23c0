"""k-means: weighted, of numbers, in many rows at once (Lloyd's iteration on sorted values), and of points."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.division import divided

ITERATIONS = 200  # Lloyd's iteration on numbers ends far earlier


class Lloyd:
    """Lloyd's iteration for rows of numbers with weights of at least 0.

    The cluster of each center is a range of the sorted values, so a step costs two searches per center and not one
    distance per value and center.
    """

    def __init__(self, values: Float[Tensor, "rows n"], weights: Float[Tensor, "rows n"]) -> None:
        self.values, order = values.double().contiguous().sort(1)  # a sort keeps the strides, which searches copy
        self.weights = weights.double().gather(1, order)
        self.mass = _running(self.weights)
        self.sums = _running(self.weights * self.values)

    def equal_mass(self, count: int) -> Float[Tensor, "rows count"]:
        """Return centers that divide the weight of each row into equal shares: the means of the shares."""
        shares = torch.linspace(0, 1, count + 1, dtype=torch.float64, device=self.values.device)[1:-1]
        ends = torch.searchsorted(self.mass[:, 1:].contiguous(), self.mass[:, -1:] * shares)
        middle = divided(2 * torch.arange(count, dtype=torch.float64, device=self.values.device) + 1, 2 * count)
        indices = torch.searchsorted(self.mass[:, 1:].contiguous(), self.mass[:, -1:] * middle)
        return self._means(ends, self.values.gather(1, indices.clamp(max=self.values.shape[1] - 1)))

    def equal_range(self, count: int) -> Float[Tensor, "rows count"]:
        """Return centers at equal distances between the smallest and the largest value."""
        low, high = self.values[:, :1], self.values[:, -1:]
        steps = divided(torch.arange(count, dtype=torch.float64, device=low.device) + 0.5, count)
        return low + (high - low) * steps

    def steps(self, centers: Float[Tensor, "rows count"]) -> Iterator[Float[Tensor, "rows count"]]:
        """Yield the centers after every step, until they do not change; a center without weight does not move."""
        for _ in range(ITERATIONS):
            moved = self._means(self._ends(centers), centers)
            yield moved
            if torch.equal(moved, centers):
                return
            centers = moved

    def error(self, centers: Float[Tensor, "rows count"]) -> Float[Tensor, " rows"]:
        """Return the weighted squared error of each row."""
        nearest = centers.gather(1, assign(self.values, centers))
        return ((self.values - nearest).square() * self.weights).sum(1)

    def _ends(self, centers: Tensor) -> Int[Tensor, "rows count-1"]:
        """Return the end of each range except the last; values nearer to the next center belong to the next range."""
        return torch.searchsorted(self.values, ((centers[:, 1:] + centers[:, :-1]) / 2).contiguous())

    def _means(self, ends: Int[Tensor, "rows count-1"], empty_centers: Tensor) -> Float[Tensor, "rows count"]:
        """Return the weighted means of the ranges, in ascending order."""
        rows, size = self.values.shape
        bounds = torch.cat([ends.new_zeros(rows, 1), ends, ends.new_full((rows, 1), size)], 1)
        mass, sums = (running.gather(1, bounds).diff(dim=1) for running in (self.mass, self.sums))
        return (
            torch.where(mass > 0, sums / mass.clamp(min=torch.finfo(torch.float64).tiny), empty_centers).sort(1).values
        )


def kmeans(
    values: Float[Tensor, "rows n"], weights: Float[Tensor, "rows n"], count: int
) -> Float[Tensor, "rows count"]:
    """Minimize the sum of weight * (value - center)^2 of each row locally.

    The iteration starts from equal shares of the weight and from equal distances; the better result of each row is
    returned. A row whose weights are all zero is treated as if its weights were equal.

    Args:
        values: numbers to cluster.
        weights: weights of at least 0.
        count: number of centers.

    Returns:
        Ascending centers in float64.
    """
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, 1)
    lloyd = Lloyd(values, weights)
    results: list[Tensor] = []
    for start in (lloyd.equal_mass(count), lloyd.equal_range(count)):
        *_, converged = lloyd.steps(start)
        results.append(converged)
    error_of_mass_start, error_of_range_start = (lloyd.error(centers) for centers in results)
    return torch.where((error_of_mass_start <= error_of_range_start)[:, None], *results)


def assign(values: Float[Tensor, "rows n"], centers: Float[Tensor, "rows count"]) -> Int[Tensor, "rows n"]:
    """Return the index of the nearest center of every value.

    Args:
        values: the values.
        centers: ascending.
    """
    values = values.to(centers.dtype).contiguous()
    return torch.searchsorted(((centers[:, 1:] + centers[:, :-1]) / 2).contiguous(), values)


RESTARTS = 10  # starts of `clusters`; the default of scikit-learn's k-means++ while RPTQ was written


def clusters(points: Float[Tensor, "n length"], count: int, seed: int = 0) -> Int[Tensor, " n"]:
    """Assign points to clusters: the least error of RESTARTS runs of Lloyd's iteration that start by k-means++.

    Clusters without points are possible if fewer than `count` points differ. The result is on the CPU.
    """
    points, generator = points.double().cpu(), torch.Generator().manual_seed(seed)
    best, least_error = torch.zeros(len(points), dtype=torch.int64), torch.inf
    for _ in range(RESTARTS):
        centers = _plus_plus(points, count, generator)
        assigned = best
        for _ in range(ITERATIONS):
            assigned = torch.cdist(points, centers).argmin(1)
            mass = torch.bincount(assigned, minlength=count).double()[:, None]
            sums = torch.zeros_like(centers).index_add_(0, assigned, points)
            new_centers = torch.where(mass > 0, sums / mass.clamp(min=1), centers)
            if torch.equal(new_centers, centers):
                break
            centers = new_centers
        error = float((points - centers[assigned]).square().sum())
        if error < least_error:
            best, least_error = assigned, error
    return best


def _plus_plus(
    points: Float[Tensor, "n length"], count: int, generator: torch.Generator
) -> Float[Tensor, "count length"]:
    """Draw centers from the points by their squared distance to the previous centers (Arthur & Vassilvitskii 2007)."""
    indices = [int(torch.randint(len(points), (1,), generator=generator))]
    squared_distances = (points - points[indices[0]]).square().sum(1)
    while len(indices) < count:
        drawn = (
            torch.multinomial(squared_distances, 1, generator=generator)
            if bool((squared_distances > 0).any())
            else torch.zeros(1)
        )
        indices.append(int(drawn))
        squared_distances = torch.minimum(squared_distances, (points - points[indices[-1]]).square().sum(1))
    return points[indices].clone()


def _running(values: Float[Tensor, "rows n"]) -> Float[Tensor, "rows n+1"]:
    return torch.nn.functional.pad(values.cumsum(1), (1, 0))
