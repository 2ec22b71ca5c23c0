"""Compensation for removed weights: the least-squares values of those that remain, by channel or by mask."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.errors import NumericError
from compress.numerics.linalg import inverse_factor

CONVERGED = 1e-12  # of the first squared residual: smaller ones are float32 rounding errors, and the row stops


def repaired(
    weight: Float[Tensor, "out in"], gram: Float[Tensor, "in in"], columns: Int[Tensor, " kept"], damping: float
) -> tuple[Float[Tensor, "out kept"], float]:
    """Fit the remaining channels to the output of the whole weight by ridge regression.

    Minimizes ||X_K W'^T - X W^T||^2 + damping * mean(diag G_KK) ||W' - W_K||^2. The ridge term pulls towards the
    original
    weight, so that directions without data do not change. With R the removed channels:
    W' = W_K + W_R G_RK inv(G_KK + damping * mean(diag G_KK) I).

    Args:
        weight: W.
        gram: G ~ X^T X.
        columns: K, the remaining channels.
        damping: relative to the mean of the diagonal.

    Returns:
        (W', damping used).

    Raises:
        NumericError: as `inverse_factor`.
    """
    removed = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
    removed[columns] = False
    gram_of_columns = gram[columns][:, columns]
    if not bool(gram_of_columns.diagonal().any()):  # no input reached these channels
        return weight[:, columns], damping
    factor, used = inverse_factor(gram_of_columns, damping)
    # inv(H) = U^T U
    change = weight[:, removed] @ gram[removed][:, columns] @ factor.T @ factor
    return weight[:, columns] + change, used


def repaired_in_mask(
    weight: Float[Tensor, "out in"],
    start: Float[Tensor, "out in"],
    mask: Bool[Tensor, "out in"],
    gram: Float[Tensor, "in in"],
    damping: float,
    steps: int,
) -> Float[Tensor, "out in"]:
    """Reduce ||X V^T - X W^T||^2 + damping * mean(diag G) ||V - W||^2 over V that are zero outside of the mask.

    Every row of V solves a separate linear system, G_MM v = (G w)_M. Conjugate gradients with the diagonal as
    preconditioner (Jacobi; Golub & Van Loan, Matrix Computations, algorithm 11.5.1) solve all rows together, so a step
    is
    one matrix product.

    Args:
        weight: W.
        start: initial V, zero outside of the mask.
        mask: True where V may differ from zero.
        gram: G ~ X^T X; the mean of its diagonal is that of the channels that are not always zero.
        damping: relative to the mean of the diagonal.
        steps: as many steps as columns or more give the optimum; fewer fit the calibration text less closely.

    Raises:
        NumericError: if G is not finite.
    """
    diagonal = gram.diagonal()
    if not bool(torch.isfinite(diagonal).all()):
        raise NumericError("the Hessian of the layer's inputs holds NaN or infinity")
    if not bool(diagonal.any()):  # no input reached the layer
        return start
    damped, solution = gram.clone(), start.clone()
    damped.diagonal().add_(damping * diagonal[diagonal > 0].mean())
    scale = damped.diagonal().reciprocal()
    # r = ((W - V) G)_M, minus half of the gradient; z = r / diag(G); p = z + beta p
    residual = ((weight - start) @ damped).mul_(mask)
    direction = residual * scale
    energy = (residual * direction).sum(1, keepdim=True)
    smallest_energy = CONVERGED * energy
    for _ in range(steps):
        image = (direction @ damped).mul_(mask)
        curvature = (direction * image).sum(1, keepdim=True)
        length = torch.where((energy > smallest_energy) & (curvature > 0), energy / curvature, 0)
        solution.addcmul_(length, direction)
        residual.addcmul_(length, image, value=-1)
        scaled = residual * scale
        old_energy, energy = energy, (residual * scaled).sum(1, keepdim=True)
        direction.mul_(torch.where(old_energy > smallest_energy, energy / old_energy, 0)).add_(scaled)
    return solution


def repaired_in_mask_bytes(rows: int, width: int) -> int:
    """Return the peak memory of `repaired_in_mask` in bytes, including its inputs: two Hessians and eight weights."""
    return 2 * 4 * width * width + 8 * 4 * rows * width
