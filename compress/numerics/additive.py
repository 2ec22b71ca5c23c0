"""Runs of weights as sums of codebook entries: the start, the codes, and the entries, for the error of the output.

The weight of row r is s_r * sum_m books_m[codes_m], run by run. All steps lower tr(E H E^T), where E is the error of
the weight and H = 2/n X^T X, the Hessian of the layer's output error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.linalg import inverse_of_upper

SAMPLE = 1 << 15  # runs that the k-means of a codebook uses
KMEANS_STEPS = 12
CHUNK = 1 << 14  # runs whose distances are computed at once
TINY = 1e-20


@dataclass
class Books:
    """The state of a layer.

    Attributes:
        weight: the weight to approximate.
        hessian: damped.
        scale: scale of each row.
        books: the codebooks.
        codes: index of the entry of each run in each codebook.
    """

    weight: Float[Tensor, "out in"]
    hessian: Float[Tensor, "in in"]
    scale: Float[Tensor, " out"]
    books: Float[Tensor, "count entries length"]
    codes: Int[Tensor, "count out runs"]

    @property
    def length(self) -> int:
        """The number of weights of a run."""
        return self.books.shape[2]

    def reconstructed(self, books: Float[Tensor, "count entries length"]) -> Float[Tensor, "out in"]:
        """Return the weight that the codes give with other codebooks; it is linear in them."""
        rows = sum(book[codes] for book, codes in zip(books, self.codes, strict=True))
        assert isinstance(rows, Tensor)
        return rows.flatten(1) * self.scale[:, None]

    def error(self) -> float:
        """Return tr(E H E^T)."""
        residual = self.weight - self.reconstructed(self.books)
        return float(((residual @ self.hessian) * residual).sum())

    def entry_sums(self, values: Float[Tensor, "out in"]) -> Float[Tensor, "count entries length"]:
        """Sum values over the weights of every number in the codebooks: the adjoint of `reconstructed`."""
        runs = (values * self.scale[:, None]).reshape(-1, self.length)
        sums = torch.zeros_like(self.books)
        for book, codes in zip(sums, self.codes, strict=True):
            book.index_add_(0, codes.reshape(-1), runs)
        return sums

    def fit_books(self, steps: int) -> None:
        """Fit the entries to the current codes by conjugate gradients on their least squares."""
        weighted_error = (self.weight - self.reconstructed(self.books)) @ self.hessian
        residual = self.entry_sums(weighted_error)
        direction, size = residual, residual.square().sum()
        for _ in range(steps):
            change = self.reconstructed(direction) @ self.hessian
            curved = self.entry_sums(change)
            step = size / (direction * curved).sum().clamp_(min=TINY)
            self.books = self.books + step * direction
            residual = residual - step * curved
            old_size, size = size, residual.square().sum()
            if float(size) <= TINY:
                return
            direction = residual + (size / old_size) * direction

    def fit_scales(self) -> None:
        """Fit the scale of every row to the current codes and codebooks."""
        plain = self.reconstructed(self.books) / self.scale[:, None]
        weighted = plain @ self.hessian
        best_scale = (weighted * self.weight).sum(1) / (weighted * plain).sum(1).clamp_(min=TINY)
        self.scale = torch.where(best_scale > 0, best_scale, self.scale)

    def fit_codes(self, book: int) -> None:
        """Choose the codes of one codebook again, run after run, with the other runs and codebooks fixed (coordinate
        descent).
        """
        residual = self.weight - self.reconstructed(self.books)  # E
        weighted = residual @ self.hessian  # E H, kept up to date
        entries = self.books[book]
        squares = self.scale.square()[:, None]
        for column in range(0, residual.shape[1], self.length):
            run = column // self.length
            block = self.hessian[column : column + self.length, column : column + self.length]
            current = entries[self.codes[book, :, run]]
            # Adding s d to the run changes the error by s^2 d H d - 2 s d (E H); d = entry - now
            gain = weighted[:, column : column + self.length] * self.scale[:, None] + squares * (current @ block)
            cost = squares * ((entries @ block) * entries).sum(1)[None] - 2 * gain @ entries.T
            chosen = cost.argmin(1)
            change = (entries[chosen] - current) * self.scale[:, None]
            weighted -= change @ self.hessian[column : column + self.length]
            self.codes[book, :, run] = chosen

    def sweep(self, factor: Float[Tensor, "in in"]) -> None:
        """Choose all codes of one codebook from left to right; later runs compensate the error of a run (GPTVQ).

        Within a run the error (w - c) inv(U_run) decides.

        Args:
            factor: U of inv(H) = U^T U.
        """
        weight = self.weight / self.scale[:, None]
        for column in range(0, weight.shape[1], self.length):
            columns = slice(column, column + self.length)
            inverse = inverse_of_upper(factor[columns, columns])
            entries = self.books[0]
            values = weight[:, columns]
            chosen = nearest(values @ inverse, entries @ inverse)
            self.codes[0, :, column // self.length] = chosen
            weight[:, column + self.length :] -= ((values - entries[chosen]) @ inverse) @ factor[
                columns, column + self.length :
            ]


def start(
    weight: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"],
    factor: Float[Tensor, "in in"],
    entries: int,
    length: int,
    count: int,
    seed: int,
) -> Books:
    """Initialize codebooks by k-means of the runs of normalized rows, and codes by a sweep if there is one codebook.

    Each further codebook is fitted to the residual of the previous ones.
    """
    scale = weight.square().mean(1).sqrt().clamp(min=1e-8)
    residual = (weight / scale[:, None]).reshape(-1, length)
    importance = hessian.diagonal().reshape(-1, length).mean(1).repeat(weight.shape[0])
    generator = torch.Generator().manual_seed(seed)
    books, codes = [], []
    for _ in range(count):
        chosen = torch.randperm(len(residual), generator=generator)[:SAMPLE].to(residual.device)
        book = vector_kmeans(residual[chosen], importance[chosen], entries, generator)
        code = nearest(residual, book)
        residual = residual - book[code]
        books.append(book)
        codes.append(code.reshape(weight.shape[0], -1))
    state = Books(weight, hessian, scale, torch.stack(books), torch.stack(codes))
    if count == 1:
        state.sweep(factor)
    return state


def vector_kmeans(
    points: Float[Tensor, "n length"], weights: Float[Tensor, " n"], entries: int, generator: torch.Generator
) -> Float[Tensor, "entries length"]:
    """Run Lloyd's iteration from random points; an entry without points moves to the point with the largest error."""
    drawn = torch.randperm(len(points), generator=generator)[:entries].to(points.device)
    centers = points[drawn.repeat(-(-entries // len(drawn)))[:entries]].clone()
    weights = weights.clamp(min=TINY)
    for _ in range(KMEANS_STEPS):
        codes = nearest(points, centers)
        mass = torch.zeros(entries, device=points.device).index_add_(0, codes, weights)
        sums = torch.zeros_like(centers).index_add_(0, codes, points * weights[:, None])
        errors = (points - centers[codes]).square().sum(1) * weights
        centers = torch.where(mass[:, None] > 0, sums / mass[:, None].clamp(min=TINY), centers)
        empty = (mass == 0).nonzero()[:, 0]
        if len(empty):
            centers[empty] = points[errors.topk(min(len(empty), len(points))).indices].repeat(len(empty), 1)[
                : len(empty)
            ]
    return centers


def nearest(points: Float[Tensor, "n length"], centers: Float[Tensor, "entries length"]) -> Int[Tensor, " n"]:
    """Return the index of the nearest center of every point."""
    sizes = centers.square().sum(1) / 2
    return torch.cat([(part @ centers.T).sub_(sizes).argmax(1) for part in points.split(CHUNK)])


def alternate(state: Books, rounds: int, steps: int, scales: bool = True) -> list[float]:
    """Fit codebooks, scales and codes in turn, codes last.

    Returns:
        The initial error and the error after every round.
    """
    errors = [state.error()]
    for _ in range(rounds):
        state.fit_books(steps)
        if scales:
            state.fit_scales()
        for book in range(len(state.books)):
            state.fit_codes(book)
        errors.append(state.error())
    return errors
