"""Compensation for removed input channels: the least-squares weight of the channels that remain."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.linalg import inverse_factor


def repaired(
    weight: Float[Tensor, "out in"], gram: Float[Tensor, "in in"], kept: Int[Tensor, " kept"], damping: float
) -> tuple[Float[Tensor, "out kept"], float]:
    """(W', damping used): W' minimizes ||X_K W'^T - X W^T||^2 + damping * mean(diag G_KK) ||W' - W_K||^2; G ~ X^T X.

    The ridge term pulls towards the original weight, so that directions without data do not change. With R the removed
    channels: W' = W_K + W_R G_RK inv(G_KK + damping * mean(diag G_KK) I).

    Raises NumericError as `inverse_factor` does.
    """
    removed = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
    removed[kept] = False
    own = gram[kept][:, kept]
    if not bool(own.diagonal().any()):  # no input reached these channels
        return weight[:, kept], damping
    factor, used = inverse_factor(own, damping)
    # inv(H) = U^T U
    change = weight[:, removed] @ gram[removed][:, kept] @ factor.T @ factor
    return weight[:, kept] + change, used
