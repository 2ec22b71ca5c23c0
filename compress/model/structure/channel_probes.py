"""Which output channel of a module every input column of a later linear comes from, read off coded probes.

A probe multiplies every channel by a factor that spells a digit of the channel's number. Where the ratio of a column
to its value before is the same for all tokens, the way there is linear in one channel, and the ratios of all probes
spell the channel's number.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.model.structure.probes import Probe

BASE = 64
FACTORS = 2.0 ** ((2 * torch.arange(BASE) + 1) / BASE - 1)
"""The digits: from 1/2 to 2 in equal ratios of 2.2%; none is 1, so that a column that nothing reaches is told apart."""
STRAIGHT = 2e-3  # how far a ratio may vary over tokens: float32 rounds to 1e-6, neighbouring digits are 2e-2 apart
HALF = 1.7  # the factor of the probes that scale half of the channels
UNKNOWN = -1

Found = dict[str, Int[Tensor, " in"]]
"""Reader -> the source's channel of each of its input columns; only readers of which every column is known."""


def ratios(
    before: Float[Tensor, "tokens in"], after: Float[Tensor, "tokens in"]
) -> tuple[Float[Tensor, " in"], Bool[Tensor, " in"]]:
    """(r, straight): the factor r_j that takes column j from before to after (least squares), and whether it does."""
    before, after = before.double(), after.double()
    square = before.square().sum(0)
    ratio = (before * after).sum(0) / square.clamp(min=torch.finfo(torch.float64).tiny)
    straight = (after - ratio * before).norm(dim=0) <= STRAIGHT * after.norm(dim=0)
    return ratio, straight & (square > 0)


def all_at_once(probe: Probe, source: str, width: int, alike: bool = False) -> Found:
    """Columns that are linear in one channel while all channels are scaled.

    alike: every token gets the first one's output, so that attention, which then averages equal values, is linear in
    the values of a fused projection, whatever becomes of its queries and keys.
    """
    number = _shuffled(width)
    base = probe.base
    if alike:
        probe.run({source: _alike})
        base = probe.inputs
    digits: dict[str, Tensor] = {}
    place = 1
    while place < width or place == 1:
        factor = FACTORS[number // place % BASE]
        probe.run({source: lambda y, f=factor: (_alike(y) if alike else y) * f.to(y)})
        read = {n: _digits(base[n], x) for n, x in probe.inputs.items() if n in base and base[n].shape == x.shape}
        read = {n: d for n, d in read.items() if bool((d != UNKNOWN).all())}
        digits = {n: digits.get(n, 0) + d * place for n, d in read.items() if place == 1 or n in digits}
        if not digits:
            return {}
        place *= BASE
    return _named(digits, number)


def by_halves(probe: Probe, source: str, width: int) -> Found:
    """Columns that are linear in one channel and not in one other, as behind a fused projection of gate and up.

    Bit by bit of the channel's number, the channels with a 1 are scaled, and then those with a 0. Of the two, the run
    that leaves a column as it was, or that scales it straight, tells the bit.
    """
    number = _shuffled(width)
    digits: dict[str, Tensor] = {}
    for bit in range(max(width - 1, 1).bit_length()):
        ones = (number >> bit) & 1
        states = []
        for half in (ones, 1 - ones):
            factor = torch.where(half == 1, HALF, 1.0)
            probe.run({source: lambda y, f=factor: y * f.to(y)})
            states.append({name: _state(*pair) for name, pair in probe.reached().items()})
        read = {n: _bit(states[0][n], states[1][n]) for n in states[0] if n in states[1]}
        read = {n: b for n, b in read.items() if bool((b != UNKNOWN).all())}
        digits = {n: digits.get(n, 0) + (b << bit) for n, b in read.items() if bit == 0 or n in digits}
        if not digits:
            return {}
    return _named(digits, number)


def _alike(output: Tensor) -> Tensor:
    """The first token's output for all tokens, [..., tokens, channels]."""
    return output[..., :1, :].expand_as(output).clone()


def _shuffled(width: int) -> Int[Tensor, " channels"]:
    """A number for every channel, in no order, so that neighbours share no digits."""
    return torch.randperm(width, generator=torch.Generator().manual_seed(width))


def _digits(before: Tensor, after: Tensor) -> Int[Tensor, " in"]:
    """The digit that every column spells, or UNKNOWN."""
    ratio, straight = ratios(before, after)
    far = (ratio.cpu()[:, None] / FACTORS.double() - 1).abs()
    best = far.argmin(1)
    known = straight.cpu() & (far.amin(1) < STRAIGHT)
    return torch.where(known, best, UNKNOWN)


def _state(before: Tensor, after: Tensor) -> Int[Tensor, " in"]:
    """0: the column is as it was; 1: it is HALF times that; 2: neither."""
    ratio, straight = ratios(before, after)
    same = straight & ((ratio - 1).abs() < STRAIGHT)
    scaled = straight & ((ratio / HALF - 1).abs() < STRAIGHT)
    return torch.where(same, 0, torch.where(scaled, 1, 2)).cpu()


def _bit(with_ones: Tensor, with_zeros: Tensor) -> Int[Tensor, " in"]:
    """The bit of a column's linear channel; UNKNOWN where the two runs do not tell.

    The linear channel is in exactly one of the two halves: in the one that scales straight, and not in the one that
    changes nothing.
    """
    one = (with_ones == 1) & (with_zeros != 1) | (with_zeros == 0) & (with_ones == 2)
    zero = (with_zeros == 1) & (with_ones != 1) | (with_ones == 0) & (with_zeros == 2)
    return torch.where(one, 1, torch.where(zero, 0, UNKNOWN))


def _named(numbers: Found, number: Tensor) -> Found:
    """Channels by their numbers, as channels; readers with a number that no channel has are left out."""
    back = number.argsort()
    return {n: back[found] for n, found in numbers.items() if int(found.max()) < len(back)}
