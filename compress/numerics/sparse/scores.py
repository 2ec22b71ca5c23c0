"""Pruning scores of weights, from their magnitudes and the norms of their inputs."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

RIA_EXPONENT = 0.5  # RIA, section 4.1: exponent of the input norm
SMALLEST = 1e-30  # lower bound of row and column sums, so that rows and columns of zeros score zero


def wanda(weight: Float[Tensor, "out in"], norm: Float[Tensor, " in"]) -> Float[Tensor, "out in"]:
    """Return S_ij = |W_ij| * ||X_j||_2  (Sun 2023, equation 1)."""
    return weight.abs() * norm


def ria(
    weight: Float[Tensor, "out in"], norm: Float[Tensor, " in"], a: float = RIA_EXPONENT
) -> Float[Tensor, "out in"]:
    """Return RIA_ij = (|W_ij| / sum|W_*j| + |W_ij| / sum|W_i*|) * ||X_j||_2^a  (Zhang 2024, equation 4)."""
    size = weight.abs()
    by_column, by_row = (size.sum(axis, keepdim=True).clamp(min=SMALLEST) for axis in (0, 1))
    return (size / by_column + size / by_row) * norm.pow(a)
