"""Compensation for removed weights: the least-squares values of those that remain, by channel or by mask."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.errors import NumericError
from compress.numerics.linalg import inverse_factor

CONVERGED = 1e-12  # of the first squared residual: below it a row holds rounding errors of float32 alone, and rests


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


def repaired_in_mask(
    weight: Float[Tensor, "out in"],
    start: Float[Tensor, "out in"],
    mask: Bool[Tensor, "out in"],
    gram: Float[Tensor, "in in"],
    damping: float,
    steps: int,
) -> Float[Tensor, "out in"]:
    """V, zero outside of the mask, with less ||X V^T - X W^T||^2 + damping * mean(diag G) ||V - W||^2 than `start`.

    Every row of V is the solution of a linear system of its own, G_MM v = (G w)_M. `steps` steps of conjugate gradients
    with the diagonal as preconditioner (Jacobi; Golub & Van Loan, Matrix Computations, algorithm 11.5.1) solve all rows
    together, so a step is one matrix product. G ~ X^T X; the mean is that of the channels that are not always zero.
    start: zero outside of the mask. `steps` of the number of columns or more give the optimum; fewer fit the
    calibration text less closely.

    Raises NumericError if G is not finite.
    """
    diagonal = gram.diagonal()
    if not bool(torch.isfinite(diagonal).all()):
        raise NumericError("the Hessian of the layer's inputs holds NaN or infinity")
    if not bool(diagonal.any()):  # no input reached the layer
        return start
    damped, found = gram.clone(), start.clone()
    damped.diagonal().add_(damping * diagonal[diagonal > 0].mean())
    scale = damped.diagonal().reciprocal()
    # r = ((W - V) G)_M, minus half of the gradient; z = r / diag(G); p = z + beta p
    residual = ((weight - start) @ damped).mul_(mask)
    direction = residual * scale
    energy = (residual * direction).sum(1, keepdim=True)
    least = CONVERGED * energy
    for _ in range(steps):
        image = (direction @ damped).mul_(mask)
        curvature = (direction * image).sum(1, keepdim=True)
        length = torch.where((energy > least) & (curvature > 0), energy / curvature, 0)
        found.addcmul_(length, direction)
        residual.addcmul_(length, image, value=-1)
        scaled = residual * scale
        before, energy = energy, (residual * scaled).sum(1, keepdim=True)
        direction.mul_(torch.where(before > least, energy / before, 0)).add_(scaled)
    return found


def repaired_in_mask_bytes(rows: int, width: int) -> int:
    """Peak memory of `repaired_in_mask`, its inputs included: two matrices, and eight of the size of the weight."""
    return 2 * 4 * width * width + 8 * 4 * rows * width
