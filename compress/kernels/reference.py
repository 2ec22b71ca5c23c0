"""Reference implementation in plain torch: quantize, dequantize, multiply. It is the oracle of all kernels; it may be
slow.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compress.kernels.contract import PartLike, RoundingLike


def linear(x: Tensor, parts: Sequence[PartLike], rounding: RoundingLike | None, bias: Tensor | None) -> Tensor:
    """Compute the sum over parts of rounding(x) W^T + bias, with every W dequantized in the dtype of x."""
    x = x if rounding is None else rounding(x)
    main_part, *other_parts = parts
    y = main_part.product(x, bias)
    for part in other_parts:
        y = y + part.product(x)
    return y
