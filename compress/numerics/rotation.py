"""Rotations of channels."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def principal_components(
    covariance: Float[Tensor, "n n"],
) -> tuple[Float[Tensor, "n n"], Float[Tensor, " n"]]:
    """(Q, energy): orthogonal Q whose columns are the eigenvectors, those with the most energy first.

    x Q are the components of x. Computed in float64, given in the covariance's dtype; the largest entry of each column
    is positive, so that there is one Q only.
    """
    energy, vectors = torch.linalg.eigh(covariance.double())
    energy, vectors = energy.flip(0).clamp(min=0), vectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return (vectors * largest.sign()).to(covariance.dtype), energy.to(covariance.dtype)
