"""The reference in plain torch: round, dequantize, multiply. It is the oracle of all kernels; it may be slow."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compress.kernels.contract import Part, RoundingLike


def linear(x: Tensor, parts: Sequence[Part], rounding: RoundingLike | None, bias: Tensor | None) -> Tensor:
    """Compute sum over parts of rounding(x) W^T + bias, with every W dequantized in the dtype of x."""
    x = x if rounding is None else rounding(x)
    first, *others = parts
    y = first.product(x, bias)
    for part in others:
        y = y + part.product(x)
    return y
