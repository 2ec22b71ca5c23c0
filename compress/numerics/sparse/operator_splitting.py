"""Masks by operator splitting (ADMM): the layer's output is fitted, and the zeros are chosen, in turn (Meng 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.errors import NumericError
from compress.numerics.linalg import damped_

PENALTY = 0.1  # the first rho, relative to the diagonal of the Hessian, which is 1 (ALPS, appendix B.1)
PERIOD = 3  # iterations between two updates of rho
FASTEST, FAST, SLOW = 1.3, 1.2, 1.1  # factors of rho while many, some and few kept weights change
MANY, SOME = 0.1, 0.005  # of the kept weights
SMALLER = 0.2  # factor of rho while the first mask holds, because rho may be what holds it
LEAST_PENALTY = 1e-3  # where this penalty does not hold a mask, the mask is good
LONGEST = 300  # iterations; the mask settles after 20 to 100


def split_mask(
    weight: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"],
    keep: Callable[[Float[Tensor, "out in"]], Bool[Tensor, "out in"]],
    damping: float,
) -> tuple[Float[Tensor, "out in"], Bool[Tensor, "out in"], int]:
    """Minimize ||X V^T - X W^T||^2 over V with the zeros of a pattern (ALPS, algorithm 1).

    B fits the output and D has the zeros; a penalty rho ||B - D||^2 and a dual variable U, in units of rho, draw them
    together. In columns that are scaled to a Hessian H with a diagonal of 1:

        B <- W + rho (D - U - W) inv(H + rho I)
        D <- the largest of B + U, where the pattern keeps them
        U <- U + B - D

    rho grows every `PERIOD` iterations, more slowly the fewer kept weights have changed, and the mask is final when
    none has.

    Args:
        weight: W.
        hessian: H ~ X^T X; it is overwritten.
        keep: returns the mask for scores, at least 0.
        damping: of the Hessian, relative to the mean of its diagonal.

    Returns:
        (V, its mask, iterations).

    Raises:
        NumericError: if H is not finite.
    """
    if not bool(hessian.diagonal().isfinite().all()):
        raise NumericError("the Hessian of the layer's inputs holds NaN or infinity")
    dead = hessian.diagonal() == 0  # no input reached these channels: their weights are the first to go
    scale = damped_(hessian, damping).diagonal().sqrt()
    hessian.div_(scale[:, None]).div_(scale)
    scaled = (weight * scale).masked_fill_(dead, 0)
    largest, dual = scaled, torch.zeros_like(scaled)
    mask = previous_mask = keep(scaled.square())
    kept_count, rho, first_mask_holds = max(int(mask.count_nonzero()), 1), PENALTY, True
    inverse, iteration = shifted_inverse(hessian, rho), 0
    for iteration in range(1, LONGEST + 1):
        fitted = torch.addmm(scaled, (largest - dual).sub_(scaled), inverse, alpha=rho)
        dual += fitted
        mask = keep(dual.square())
        largest = dual.masked_fill(~mask, 0)
        dual -= largest
        if iteration % PERIOD:
            continue
        changed = int((mask ^ previous_mask).count_nonzero()) / kept_count
        previous_mask = mask
        # so large a penalty may itself hold the first mask
        first_mask_holds = first_mask_holds and changed <= SOME and rho > LEAST_PENALTY
        if changed == 0 and not first_mask_holds:
            break
        factor = SMALLER if first_mask_holds else FASTEST if changed > MANY else FAST if changed > SOME else SLOW
        rho *= factor
        dual /= factor
        inverse = shifted_inverse(hessian, rho)
    return torch.where(mask & dead, weight, largest / scale), mask, iteration


def shifted_inverse(hessian: Float[Tensor, "in in"], rho: float) -> Float[Tensor, "in in"]:
    """Return inv(H + rho I)."""
    shifted = hessian.clone()
    shifted.diagonal().add_(rho)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    if bool(failed):  # by the rounding errors of float32
        factor = torch.linalg.cholesky(shifted.double()).float()
    del shifted
    return torch.cholesky_inverse(factor)


def split_mask_bytes(rows: int, width: int) -> int:
    """Return the peak memory of `split_mask` in bytes: four matrices of the size of the Hessian, and five weights."""
    return 4 * 4 * width * width + 4 * 5 * rows * width + 3 * rows * width
