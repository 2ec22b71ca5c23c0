"""Rotations of channels."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def principal_components(
    covariance: Float[Tensor, "n n"],
) -> tuple[Float[Tensor, "n n"], Float[Tensor, " n"]]:
    """(Q, energy): orthogonal Q with the eigenvectors as columns, and the eigenvalues, both by descending eigenvalue.

    x Q are the principal components of x. The computation runs in float64; the results have the covariance's dtype. The
    largest entry of each column is made positive, so that Q is unique.
    """
    energy, vectors = torch.linalg.eigh(covariance.double())
    energy, vectors = energy.flip(0).clamp(min=0), vectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return (vectors * largest.sign()).to(covariance.dtype), energy.to(covariance.dtype)
