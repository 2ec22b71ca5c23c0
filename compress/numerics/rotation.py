"""Rotations of channels: principal components, and steps of an optimizer on orthogonal matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compress.numerics.linalg import solve_general


def principal_components(
    covariance: Float[Tensor, "n n"],
) -> tuple[Float[Tensor, "n n"], Float[Tensor, " n"]]:
    """Compute the principal components of a covariance.

    x Q are the principal components of x. The computation runs in float64; the results have the covariance's dtype. The
    largest entry of each column is made positive, so that Q is unique.

    Returns:
        (Q, energy): orthogonal Q with the eigenvectors as columns, and the eigenvalues, both by descending eigenvalue.
    """
    energy, vectors = torch.linalg.eigh(covariance.double())
    energy, vectors = energy.flip(0).clamp(min=0), vectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return (vectors * largest.sign()).to(covariance.dtype), energy.to(covariance.dtype)


ROUNDS = 4  # of Newton-Schulz: an error of 1e-3 becomes 1e-6, 1e-12, and less than float64 shows
SHARE = 0.5  # Li 2020, algorithm 1: q, of the largest step for which its fixed-point iteration converges


def nearest_orthogonal(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return the orthogonal matrix nearest to a nearly orthogonal one, in float64.

    Newton-Schulz: R = R (3 - R^T R) / 2.
    """
    rotation = matrix.double()
    for _ in range(ROUNDS):
        rotation = 1.5 * rotation - 0.5 * rotation @ (rotation.T @ rotation)
    return rotation


def cayley_step(
    rotation: Float[Tensor, "n n"],
    gradient: Float[Tensor, "n n"],
    momentum: Float[Tensor, "n n"] | None,
    rate: float,
    decay: float,
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """Take one step of Cayley SGD with momentum on orthogonal matrices.

    Algorithm 1 of Li 2020 (arXiv 2002.01113) for square matrices X, where X X^T = 1; SpinQuant (arXiv 2405.16406,
    equations 2 and 3). The paper approximates the inverse by a fixed-point iteration; here a linear system is solved,
    in float64, so that X stays orthogonal up to the rounding of its dtype.

    Args:
        rotation: X.
        gradient: gradient of the loss by X.
        momentum: None in the first step.
        rate: the largest step.
        decay: decay of the momentum, beta.

    Returns:
        (rotation, momentum), in their dtype.
    """
    x, gradient = rotation.double(), gradient.double()
    # M = beta M - G
    moved = -gradient if momentum is None else decay * momentum.double() - gradient
    # W^ = M X^T - X (X^T M X^T) / 2, which is M X^T / 2;  W = W^ - W^^T
    half = moved @ x.T / 2
    skew = half - half.T
    # a = min(rate, 2 q / (|W| + e)), with the norm of the largest column sum, a bound of the largest singular value
    step = min(rate, 2 * SHARE / (float(skew.abs().sum(0).max()) + 1e-8))
    # X = (1 - a/2 W)^-1 (1 + a/2 W) X;  M = W X, the part of M that is tangent to the orthogonal matrices
    half_step = step / 2 * skew
    unit = torch.eye(len(x), dtype=x.dtype, device=x.device)
    new = solve_general(unit - half_step, x + half_step @ x)
    return new.to(rotation.dtype), (skew @ x).to(rotation.dtype)
