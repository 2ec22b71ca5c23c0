"""Codebooks of magnitudes: runs of 4 or 8 weights share an entry, and each weight has a sign (i-quants of llama.cpp).

A weight is its sign times a level of the entry times a scale. In some codebooks the number of minus signs of eight
consecutive weights is even, so that seven bits store their signs. The entries are those of llama.cpp
(ggml-common.h, iq3s_grid and the others), read from its package `gguf`: without it, codes can be decoded, but not
chosen.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.errors import ModelError
from compress.numerics.linalg import solve_general

UNIT = 8
"""Columns whose signs may depend on each other."""
FLIPPED = 2  # signs of a run that are tried both ways, those for which it costs least; one more if parity binds them
CHUNK = 1 << 19  # scores that are computed at once: the cache of a processor holds them
GPU_CHUNK = 1 << 26


@dataclass(frozen=True)
class Codebook:
    """A codebook of an i-quant.

    Attributes:
        type_name: type in llama.cpp.
        length: weights of an entry.
        magnitudes: the levels above zero, ascending.
        even: whether the number of minus signs of `UNIT` weights is even.
    """

    type_name: str
    length: int
    magnitudes: tuple[float, ...]
    even: bool

    def entries(self) -> Int[Tensor, "entries length"]:
        """Return the entries as indexes into `magnitudes`.

        Raises:
            ModelError: if the package `gguf` is not installed.
        """
        return _entries(self.type_name)

    def index(self, magnitudes: Int[Tensor, "*any length"]) -> Int[Tensor, "*any"]:
        """Return the index of the entry with these indexes into `magnitudes`, or of the nearest one."""
        return _nearest(self).to(magnitudes.device)[self._key(magnitudes)]

    def holds(self, magnitudes: Int[Tensor, "*any length"]) -> Bool[Tensor, "*any"]:
        """Return where these indexes into `magnitudes` are an entry."""
        return (self.entries().to(magnitudes.device)[self.index(magnitudes)] == magnitudes).all(-1)

    def _key(self, magnitudes: Int[Tensor, "*any length"]) -> Int[Tensor, "*any"]:
        base = len(self.magnitudes)
        places = torch.tensor([base**i for i in range(self.length)], device=magnitudes.device)
        return (magnitudes.long() * places).sum(-1)

    def encode(self, values: Float[Tensor, "*any columns"]) -> Int[Tensor, "*any columns"]:
        """Return signed levels near values, as indexes into the negative and positive levels in ascending order.

        Each value is rounded to a level, and each run to the entry nearest to its levels. If the minus signs of eight
        weights are odd in number, the sign for which it costs least is changed. A short last run is padded with zeros.
        """
        count = values.shape[-1] if values.dim() else 1
        values = torch.nn.functional.pad(values.reshape(*values.shape[:-1], count), (0, -count % UNIT))
        size, half = values.abs(), len(self.magnitudes)
        levels = torch.tensor(self.magnitudes, dtype=values.dtype, device=values.device)
        rounded = torch.bucketize(size.contiguous(), (levels[1:] + levels[:-1]) / 2)
        entry = self.index(rounded.unflatten(-1, (-1, self.length)))
        index = self.entries().to(values.device)[entry].flatten(-2).long()
        negative = torch.signbit(values)
        if self.even:
            # (|w| + m)^2 - (|w| - m)^2 = 4 |w| m
            cost, units = (size * levels[index]).unflatten(-1, (-1, UNIT)), negative.unflatten(-1, (-1, UNIT))
            is_odd = units.sum(-1, keepdim=True) % 2 == 1
            cheapest = torch.zeros_like(units).scatter_(-1, cost.argmin(-1, keepdim=True), True)
            negative = (units ^ (cheapest & is_odd)).flatten(-2)
        return torch.where(negative, half - 1 - index, half + index)[..., :count]


@cache
def _entries(type_name: str) -> Int[Tensor, "entries length"]:
    try:
        from gguf import quants  # an optional dependency
    except ImportError:
        raise ModelError(
            f"the codebook of {type_name} is read from the package gguf, which is not installed; "
            "install compress-llm[gguf]"
        ) from None
    kind = getattr(quants, type_name)
    kind.init_grid()
    with torch.inference_mode(False):
        values = torch.from_numpy(kind.grid.copy()).view(kind.grid_shape)
        levels = torch.tensor(sorted(kind.grid_map), dtype=values.dtype)
        return torch.searchsorted(levels, values.contiguous())


@cache
def _nearest(codebook: Codebook) -> Int[Tensor, " keys"]:
    """Return the index of the entry of the least squared distance for each combination of levels."""
    with torch.inference_mode(False):
        count = len(codebook.magnitudes)
        levels, entries = torch.tensor(codebook.magnitudes), codebook.entries()
        keys = torch.cartesian_prod(*[torch.arange(count)] * codebook.length).flip(-1)  # the first one counts least
        points = levels[entries]
        # |e|^2 - 2 <k, e> orders entries as |k - e|^2 does; all numbers are exact in float32
        scores = points.square().sum(1) - 2 * levels[keys] @ points.T
        return scores.argmin(1)


class Runs(NamedTuple):
    """Chosen runs.

    Attributes:
        codes: indexes into the signed levels.
        values: the levels.
        cost: (a - v) M (a - v)^T, for values v.
    """

    codes: Int[Tensor, "rows columns"]
    values: Float[Tensor, "rows columns"]
    cost: Float[Tensor, " rows"]


class RunSearch:
    """Search of the runs of the least quadratic error for `UNIT` columns of many rows.

    Args:
        codebook: the codebook.
        matrix: M, positive definite: an error e costs e M e^T.

    A unit with two runs decides the first one by the error that the best second one leaves without rounding, then the
    second one given the first, for an even and an odd number of minus signs in each where the codebook asks for it.
    """

    def __init__(self, codebook: Codebook, matrix: Float[Tensor, "unit unit"]) -> None:
        self.codebook, self.matrix, length = codebook, matrix, codebook.length
        self.levels = torch.tensor(codebook.magnitudes, dtype=matrix.dtype, device=matrix.device)
        self.points = self.levels[codebook.entries().to(matrix.device)]
        self._patterns = _patterns(length).to(matrix.device)
        if length == UNIT:
            self._tables = [self._table(matrix)]
            return
        upper, across, lower = matrix[:length, :length], matrix[:length, length:], matrix[length:, length:]
        # the best second error for a first one e is -e M12 inv(M22)
        self._carry = solve_general(lower, across.T).T
        self._reduced = upper - self._carry @ across.T
        self._reduced = (self._reduced + self._reduced.T) / 2
        self._tables = [self._table(self._reduced), self._table(lower)]

    def _table(self, matrix: Float[Tensor, "length length"]) -> Float[Tensor, "patterns entries"]:
        """Return v M v^T for the entries with the signs of every pattern."""
        squares = (self.points[:, :, None] * self.points[:, None, :]).flatten(1)
        signs = self._patterns.to(matrix.dtype)
        return (signs[:, :, None] * signs[:, None, :] * matrix).flatten(1) @ squares.T

    def nearest(self, targets: Float[Tensor, "rows unit"]) -> Runs:
        """Return the runs for targets that are divided by their scales."""
        entries, length = len(self.points), self.codebook.length
        flips = len(_flips(length, None if not self.codebook.even else False))
        limit = CHUNK if targets.device.type == "cpu" else GPU_CHUNK
        parts = [self._nearest(part) for part in targets.split(max(1, limit // (entries * flips)))]
        return Runs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _nearest(self, targets: Float[Tensor, "rows unit"]) -> Runs:
        length, even = self.codebook.length, self.codebook.even
        if length == UNIT:
            return self._search(targets, self.matrix, self._tables[0], False if even else None)
        near, far = targets[:, :length], targets[:, length:]
        matrix = self.matrix[length:, length:]
        best: Runs | None = None
        for odd in (False, True) if even else (None,):
            head = self._search(near, self._reduced, self._tables[0], odd)
            tail = self._search(far + (near - head.values) @ self._carry, matrix, self._tables[1], odd)
            pair = Runs(
                torch.cat([head.codes, tail.codes], 1),
                torch.cat([head.values, tail.values], 1),
                head.cost + tail.cost,
            )
            if best is None:
                best = pair
                continue
            better = pair.cost < best.cost
            best = Runs(
                torch.where(better[:, None], pair.codes, best.codes),
                torch.where(better[:, None], pair.values, best.values),
                torch.where(better, pair.cost, best.cost),
            )
        assert best is not None
        return best

    def _search(
        self,
        targets: Float[Tensor, "rows length"],
        matrix: Float[Tensor, "length length"],
        table: Float[Tensor, "patterns entries"],
        odd: bool | None,
    ) -> Runs:
        """Return the best runs of one entry.

        Args:
            targets: a.
            matrix: M.
            table: v M v^T by signs and entry.
            odd: whether the number of minus signs is odd; None: any number.
        """
        length, half = self.codebook.length, len(self.levels)
        negative = torch.signbit(targets)
        place = torch.tensor([1 << i for i in range(length)], device=targets.device)
        order = (targets.abs() * matrix.diagonal()).argsort(dim=1)  # by what a wrong sign costs, for a given level
        pattern = (negative * place).sum(1)
        if odd is not None:  # make the number of minus signs what it must be, by the cheapest sign
            pattern = pattern ^ torch.where(negative.sum(1) % 2 == int(odd), 0, place[order[:, 0]])
        flips = _flips(length, odd).to(targets.device)
        patterns = pattern[:, None] ^ (place[order][:, None] * flips).sum(-1)  # [rows, flips]
        signs = self._patterns[patterns].to(targets.dtype)
        slopes = (targets @ matrix)[:, None] * signs
        # (a - v) M (a - v)^T = a M a^T + v M v^T - 2 a M v^T
        scores = torch.addmm(table[patterns.flatten()], slopes.flatten(0, 1), self.points.T, alpha=-2)
        lowest, entry = scores.view(len(targets), -1, len(self.points)).min(-1)
        cost, flip = lowest.min(1)
        rows = torch.arange(len(targets), device=targets.device)
        index, sign = self.codebook.entries().to(targets.device)[entry[rows, flip]], signs[rows, flip]
        codes = torch.where(sign < 0, half - 1 - index, half + index)
        return Runs(codes, self.levels[index] * sign, cost + ((targets @ matrix) * targets).sum(1))


@cache
def _patterns(length: int) -> Float[Tensor, "patterns length"]:
    """Return the signs of every pattern; bit i is set where weight i is negative."""
    with torch.inference_mode(False):
        bits = (torch.arange(1 << length)[:, None] >> torch.arange(length)) & 1
        return 1.0 - 2.0 * bits


@cache
def _flips(length: int, odd: bool | None) -> Int[Tensor, "flips length"]:
    """Return the sets of cheapest signs that are changed: all subsets, or those of an even size."""
    with torch.inference_mode(False):
        subsets = itertools.product((0, 1), repeat=FLIPPED if odd is None else FLIPPED + 1)
        allowed = [subset for subset in subsets if odd is None or sum(subset) % 2 == 0]
        return torch.nn.functional.pad(torch.tensor(allowed), (0, length - len(allowed[0])))
