"""Find the output channel of a module that each input column of a later linear depends on, with coded probes.

A probe multiplies each channel by a factor that encodes one digit of the channel's number. When the ratio of a column
to its value in the plain run is the same for all tokens, the column is linear in one channel, and the ratios of all
probes spell the number of that channel.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.models.structure.probes import Probe

BASE = 64
FACTORS = 2.0 ** ((2 * torch.arange(BASE) + 1) / BASE - 1)
"""The digits: factors from 1/2 to 2, 2.2% apart; none is 1, so that an unreached column is distinguishable."""
LINEAR_TOLERANCE = 2e-3  # tolerance of a ratio over tokens: float32 rounds to 1e-6, neighbouring digits are 2e-2 apart
HALF_FACTOR = 1.7  # the factor of probes that scale half of the channels
UNKNOWN = -1

ChannelMap = dict[str, Int[Tensor, " in"]]
"""Reader -> the source's channel for each of its input columns; only readers for which every column is known."""


def ratios(
    plain: Float[Tensor, "tokens in"], probed: Float[Tensor, "tokens in"]
) -> tuple[Float[Tensor, " in"], Bool[Tensor, " in"]]:
    """Compare the inputs of a reader in the plain run and in a probe run, column by column.

    Returns:
        The least-squares factor of each column from the plain to the probed values, and whether it is exact.
    """
    plain, probed = plain.double(), probed.double()
    square = plain.square().sum(0)
    ratio = (plain * probed).sum(0) / square.clamp(min=torch.finfo(torch.float64).tiny)
    linear = (probed - ratio * plain).norm(dim=0) <= LINEAR_TOLERANCE * probed.norm(dim=0)
    return ratio, linear & (square > 0)


def all_at_once(probe: Probe, source: str, width: int, equal_tokens: bool = False) -> ChannelMap:
    """Find columns that are linear in one channel by scaling all channels at once.

    Args:
        probe: the block and its plain run.
        source: linear whose output channels are scaled.
        width: number of output channels of the source.
        equal_tokens: whether every token gets the output of the first token. Attention then averages equal values and
            is linear in the values of a fused projection, whatever its queries and keys are.
    """
    number = _shuffled(width)
    base = probe.base
    if equal_tokens:
        probe.run({source: _first_token})
        base = probe.inputs
    digits: dict[str, Tensor] = {}
    place = 1
    while place < width or place == 1:
        factor = FACTORS[number // place % BASE]
        probe.run({source: lambda y, f=factor: (_first_token(y) if equal_tokens else y) * f.to(y)})
        read = {n: _digits(base[n], x) for n, x in probe.inputs.items() if n in base and base[n].shape == x.shape}
        read = {n: d for n, d in read.items() if bool((d != UNKNOWN).all())}
        digits = {n: digits.get(n, 0) + d * place for n, d in read.items() if place == 1 or n in digits}
        if not digits:
            return {}
        place *= BASE
    return _named(digits, number)


def by_halves(probe: Probe, source: str, width: int) -> ChannelMap:
    """Find columns that are linear in one channel but not in another, as after a fused gate and up projection.

    For each bit of the channel's number, one run scales the channels with a 1, another run those with a 0. A column
    that stays unchanged or scales linearly in one of the runs gives the bit.
    """
    number = _shuffled(width)
    digits: dict[str, Tensor] = {}
    for bit in range(max(width - 1, 1).bit_length()):
        ones = (number >> bit) & 1
        states = []
        for half in (ones, 1 - ones):
            factor = torch.where(half == 1, HALF_FACTOR, 1.0)
            probe.run({source: lambda y, f=factor: y * f.to(y)})
            states.append({name: _state(*pair) for name, pair in probe.reached().items()})
        read = {n: _bit(states[0][n], states[1][n]) for n in states[0] if n in states[1]}
        read = {n: b for n, b in read.items() if bool((b != UNKNOWN).all())}
        digits = {n: digits.get(n, 0) + (b << bit) for n, b in read.items() if bit == 0 or n in digits}
        if not digits:
            return {}
    return _named(digits, number)


def _first_token(output: Tensor) -> Tensor:
    """Return the output of the first token for all tokens, [..., tokens, channels]."""
    return output[..., :1, :].expand_as(output).clone()


def _shuffled(width: int) -> Int[Tensor, " channels"]:
    """Return a random number for each channel, so that neighbouring channels share no digits."""
    return torch.randperm(width, generator=torch.Generator().manual_seed(width))


def _digits(plain: Tensor, probed: Tensor) -> Int[Tensor, " in"]:
    """Return the digit that each column encodes, or UNKNOWN."""
    ratio, linear = ratios(plain, probed)
    far = (ratio.cpu()[:, None] / FACTORS.double() - 1).abs()
    best = far.argmin(1)
    is_digit = linear.cpu() & (far.amin(1) < LINEAR_TOLERANCE)
    return torch.where(is_digit, best, UNKNOWN)


def _state(plain: Tensor, probed: Tensor) -> Int[Tensor, " in"]:
    """Return 0 for an unchanged column, 1 for one that is HALF_FACTOR times its plain values, 2 otherwise."""
    ratio, linear = ratios(plain, probed)
    is_unchanged = linear & ((ratio - 1).abs() < LINEAR_TOLERANCE)
    is_scaled = linear & ((ratio / HALF_FACTOR - 1).abs() < LINEAR_TOLERANCE)
    return torch.where(is_unchanged, 0, torch.where(is_scaled, 1, 2)).cpu()


def _bit(with_ones: Tensor, with_zeros: Tensor) -> Int[Tensor, " in"]:
    """Return the bit of a column's linear channel, or UNKNOWN when the two runs do not determine it.

    The linear channel is in exactly one of the two halves: the half that scales the column linearly, and not the half
    that leaves it unchanged.
    """
    is_one = (with_ones == 1) & (with_zeros != 1) | (with_zeros == 0) & (with_ones == 2)
    is_zero = (with_zeros == 1) & (with_ones != 1) | (with_ones == 0) & (with_zeros == 2)
    return torch.where(is_one, 1, torch.where(is_zero, 0, UNKNOWN))


def _named(numbers: ChannelMap, number: Tensor) -> ChannelMap:
    """Map channel numbers back to channels; readers with a number that no channel has are dropped."""
    back = number.argsort()
    return {name: back[coded] for name, coded in numbers.items() if int(coded.max()) < len(back)}
