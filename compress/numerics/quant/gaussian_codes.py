"""Values of the states of a trellis that are nearly independent and nearly Gaussian (QTIP, section 3.1).

1mad and 3inst compute the value of a state from its bits, and hyb looks up two values at a hash of them, in a table of
2^9 pairs that is stored with the weight. Neighbouring states have most of their bits in common, and yet their values
have little in common, so that 2^k values of variance 1 are everywhere near after every state.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.additive import vector_kmeans
from compress.numerics.division import divided

Code = Literal["1mad", "3inst", "hyb"]
CODES: tuple[Code, ...] = get_args(Code)
TABLE_BITS = 9  # Q of section 4.2: pairs of the table of hyb
SAMPLE = 1 << 14  # Gaussian pairs of which the table is the k-means
DEVIATION = 147.8  # of the sums of bytes of 1mad (section 3.1.1)
WIDER = 1.04  # the best of 1, 1.02, 1.04 and 1.06 for 3inst with 2^12 states at 2 bits


def length_of(code: Code) -> int:
    """Return the number of weights of a state, V."""
    return 2 if code == "hyb" else 1


def values_of(
    code: Code, states: int, table: Float[Tensor, "entries 2"] | None = None, device: torch.device | None = None
) -> Float[Tensor, "states length"]:
    """Compute the values of all 2^states states, in float32.

    Args:
        code: the code.
        states: bits of a state.
        table: codebook of hyb; None for the other codes.
        device: device of the values.
    """
    indices = torch.arange(1 << states, device=device)
    if code == "1mad":
        return one_mad(indices)[:, None]
    if code == "3inst":
        return three_instructions(indices)[:, None]
    assert table is not None
    return hybrid(indices, table.float())


def one_mad(states: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Map states to normalized sums of the four bytes of a x + b (section 3.1.1, algorithm 1).

    The sums have the mean 510 and the deviation `DEVIATION`.
    """
    hashes = (states.long() * 34038481 + 76625530) & 0xFFFFFFFF
    bytes_ = hashes[:, None] >> torch.arange(0, 32, 8, device=hashes.device) & 255
    return divided((bytes_.sum(1) - 510).float(), DEVIATION)


def three_instructions(states: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Sum two float16 numbers made from the halves of a x + b (section 3.1.1, algorithm 2).

    Each number is 0.922 with the sign, the mantissa and the last two bits of the exponent replaced.
    """
    hashes = (states.long() * 89226354 + 64248484) & 0xFFFFFFFF
    halves = torch.stack([hashes & 0xFFFF, hashes >> 16]) & 0b1000111111111111
    halves = halves ^ torch.tensor(0.922, dtype=torch.float16).view(torch.int16).long().to(states.device)
    return _float16(halves).float().sum(0).half().float()


def hybrid(states: Int[Tensor, " n"], table: Float[Tensor, "entries 2"]) -> Float[Tensor, "n 2"]:
    """Look up two values in a table (section 3.1.2, algorithm 3).

    Bits 14 - Q + 1 to 14 of x^2 + x are the index; bit 15 is the sign of the second value.
    """
    states = states.long()
    hashes = (states * states + states) & 0xFFFFFFFF
    entries = len(table)
    pairs = table[hashes >> (15 - (entries.bit_length() - 1)) & (entries - 1)]
    sign = 1 - 2 * (hashes >> 15 & 1)
    return torch.stack([pairs[:, 0], pairs[:, 1] * sign], dim=1)


@cache
def first_table() -> Float[Tensor, "entries 2"]:
    """Compute the initial table of hyb: k-means of Gaussian pairs (section 3.1.2), with mean 0 and variance 1."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(SAMPLE, 2, generator=generator)
    table = vector_kmeans(points, torch.ones(SAMPLE), 1 << TABLE_BITS, generator)
    table = table - table.mean(0)
    return table / table.square().mean().sqrt()


def best_scale(bits: float, values: Float[Tensor, "states length"]) -> float:
    """Return the scale of the values of a code with the least squared error for a Gaussian source of variance 1.

    The best reproduction of such a source at k bits has the variance 1 - 4^-k, the source's less the distortion (Cover
    and Thomas, Elements of information theory, section 10.3.2). Trellises of few states do better with `WIDER` values.
    """
    return WIDER * math.sqrt((1 - 4.0**-bits) / float(values.double().square().mean()))


def _float16(bits: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the float16 numbers with these bits."""
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.float16)
