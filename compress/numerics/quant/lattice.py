"""Codebooks of points of the lattice E8 for runs of eight weights (QuIP#, Tseng 2024, section 4).

E8P has 2^16 points in two bytes, which are 2 bits per weight. The first byte is one of 256 vectors of magnitudes 1/2,
3/2 and 5/2: the 227 of a squared norm up to 10, and 29 of 12 without 5/2. The second byte has seven signs and a shift
of all weights by 1/4 or -1/4. The eighth sign follows: the sum of the signed vector is even, so that it is a point of
D8 + 1/2. E8 has 256 points in one byte, 1 bit per weight: zero, the 240 points of a squared norm of 2, and 15 of 4.

The paper does not say which 29 and 15 points it adds; these are the first ones in the order of their magnitudes.
"""

from __future__ import annotations

import itertools
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

LENGTH = 8
"""Weights of a run."""
SHIFT = 0.25
CHUNK = 1 << 12  # runs whose distances are computed at once

STAGES: dict[int, tuple[tuple[str, float], ...]] = {
    2: (("e8p", 1.0),),
    3: (("e8p", 1.0), ("e8", 0.49)),
    4: (("e8p", 1.0), ("e8p", 0.26)),
}
"""Bits of a weight -> the codebooks whose points are added, and the scales of these points.

The scale of a second codebook has the least squared error for Gaussian weights, found by a search.
"""
GAUSSIAN = {2: 0.97, 3: 1.02, 4: 1.12}
"""Bits of a weight -> the scale of the least squared error for Gaussian weights of variance 1, found likewise."""


@cache
def magnitudes() -> Float[Tensor, "256 8"]:
    """Return the vectors of the first byte of E8P, by squared norm."""
    vectors = sorted(
        itertools.product((0.5, 1.5, 2.5), repeat=LENGTH), key=lambda v: (sum(x * x for x in v), max(v), v)
    )
    return torch.tensor(vectors[:256])


@cache
def roots() -> Float[Tensor, "256 8"]:
    """Return the points of E8 of the smallest norms: integers with an even sum, or halves with an even sum."""
    integers = itertools.product((-1.0, 0.0, 1.0), repeat=LENGTH)
    halves = itertools.product((-0.5, 0.5), repeat=LENGTH)
    points = [v for v in itertools.chain(integers, halves) if sum(v) % 2 == 0 and sum(x * x for x in v) <= 4]
    return torch.tensor(sorted(points, key=lambda v: (sum(x * x for x in v), v))[:256])


def count_bytes(bits: int) -> int:
    """Return the number of bytes of a run of weights at `bits` bits per weight."""
    return sum(2 if book == "e8p" else 1 for book, _ in STAGES[bits])


def nearest(runs: Float[Tensor, "n 8"], bits: int) -> Int[Tensor, "n bytes"]:
    """Return the codes of the nearest points; a second codebook encodes the residual of the first."""
    stage_codes, residual = [], runs
    for book, scale in STAGES[bits]:
        codes = torch.cat([_ENCODE[book](part / scale) for part in residual.split(CHUNK)])
        residual = residual - _DECODE[book](codes) * scale
        stage_codes.append(codes)
    return torch.cat(stage_codes, dim=1)


def decode(codes: Int[Tensor, "n bytes"], bits: int) -> Float[Tensor, "n 8"]:
    """Return the points of codes."""
    points, offset = [], 0
    for book, scale in STAGES[bits]:
        size = 2 if book == "e8p" else 1
        points.append(_DECODE[book](codes[:, offset : offset + size]) * scale)
        offset += size
    return torch.stack(points).sum(0)


def _encode_e8(runs: Float[Tensor, "n 8"]) -> Int[Tensor, "n 1"]:
    points = roots().to(runs)
    return (runs @ points.T).sub_(points.square().sum(1) / 2).argmax(1, keepdim=True).to(torch.uint8)


def _decode_e8(codes: Int[Tensor, "n 1"]) -> Float[Tensor, "n 8"]:
    return roots().to(codes.device)[codes[:, 0].long()]


def _encode_e8p(runs: Float[Tensor, "n 8"]) -> Int[Tensor, "n 2"]:
    vectors = magnitudes().to(runs)
    is_odd = vectors.sum(1).remainder(2) != 0  # then the number of minus signs is odd
    best, best_codes = torch.full(runs.shape[:1], torch.inf, device=runs.device), None
    for shift in (SHIFT, -SHIFT):
        values = runs - shift
        absolute = values.abs()
        is_wrong_parity = ((values < 0).sum(1).remainder(2) != 0)[:, None] ^ is_odd
        # |v - a|^2 = |v|^2 - 2 (|v| a - |a|^2 / 2), and a wrong parity costs the cheapest flip, 4 |v_i| a_i
        flips = (absolute[:, None] * vectors).amin(-1)
        cost = (
            vectors.square().sum(1)
            - 2 * absolute @ vectors.T
            + 4 * flips * is_wrong_parity
            + values.square().sum(1, keepdim=True)
        )
        lowest_cost, index = cost.min(1)
        negative = values < 0
        flipped = (absolute * vectors[index]).argmin(1)
        is_wrong_parity = is_wrong_parity.gather(1, index[:, None])[:, 0]
        negative[is_wrong_parity, flipped[is_wrong_parity]] ^= True
        places = 2 ** torch.arange(LENGTH - 1, device=runs.device)
        sign_byte = (negative[:, :-1] * places).sum(1) + (128 if shift < 0 else 0)
        codes = torch.stack([index, sign_byte], dim=1)
        best_codes = codes if best_codes is None else torch.where((lowest_cost < best)[:, None], codes, best_codes)
        best = torch.minimum(lowest_cost, best)
    assert best_codes is not None
    return best_codes.to(torch.uint8)


def _decode_e8p(codes: Int[Tensor, "n 2"]) -> Float[Tensor, "n 8"]:
    index, sign_byte = codes.long().unbind(1)
    vectors = magnitudes().to(codes.device)[index]
    negative = (sign_byte[:, None] >> torch.arange(LENGTH - 1, device=codes.device) & 1).bool()
    is_odd = vectors.sum(1).remainder(2) != 0
    last_negative = (negative.sum(1).remainder(2) != 0) ^ is_odd
    signed = torch.where(torch.cat([negative, last_negative[:, None]], dim=1), -vectors, vectors)
    return signed + torch.where(sign_byte >= 128, -SHIFT, SHIFT)[:, None]


_ENCODE = {"e8p": _encode_e8p, "e8": _encode_e8}
_DECODE = {"e8p": _decode_e8p, "e8": _decode_e8}
