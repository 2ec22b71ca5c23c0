"""Compensation for removed weights: the least-squares values of those that remain, by channel or by mask."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.errors import NumericError
from compress.numerics.linalg import inverse_factor

BLOCK = 256  # columns that are solved together
STEPS = 4  # of conjugate gradients on a block
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
    rounds: int,
    least_gain: float = 0.0,
) -> Float[Tensor, "out in"]:
    """Reduce ||X V^T - X W^T||^2 + damping * mean(diag G) ||V - W||^2 over V that are zero outside of the mask.

    Every row of V solves a separate linear system, G_MM v = (G w)_M. Blocks of columns are solved in turn, given all
    others (block Gauss-Seidel; Golub & Van Loan, Matrix Computations, section 11.2.2), by a few steps of conjugate
    gradients. A round takes one product of the size of W G, and gains as much as four to five steps of conjugate
    gradients on all columns (eval/LOG.md).

    Args:
        weight: W.
        start: initial V, zero outside of the mask.
        mask: True where V may differ from zero.
        gram: G ~ X^T X; the mean of its diagonal is that of the channels that are not always zero.
        damping: relative to the mean of the diagonal.
        rounds: rounds over all columns; fewer fit the calibration text less closely.
        least_gain: the last round is the first one that lowers the objective, over all rows, by a smaller fraction.

    Raises:
        NumericError: if G is not finite.
    """
    diagonal = gram.diagonal()
    if not bool(torch.isfinite(diagonal).all()):
        raise NumericError("the Hessian of the layer's inputs holds NaN or infinity")
    if not bool(diagonal.any()):  # no input reached the layer
        return start
    ridge = damping * diagonal[diagonal > 0].mean()
    blocks = diagonal.argsort(descending=True, stable=True).split(BLOCK)
    # [in, out]: a column is contiguous
    difference, keep = (weight - start).T.contiguous(), mask.T.contiguous()
    first_energies: list[Tensor] = []
    for turn in range(rounds):
        objective = gain = diagonal.new_zeros((), dtype=torch.float64)
        for i, columns in enumerate(blocks):
            rows = gram[columns]
            rows[torch.arange(len(columns)), columns] += ridge
            slope, matrix = rows @ difference, rows[:, columns]
            objective = objective + (slope * difference[columns]).sum()
            residual = slope * keep[columns]
            energy = (residual.square() / matrix.diagonal()[:, None]).sum(0)
            if not turn:
                first_energies.append(energy)
            change = _solved_in_mask(matrix, residual, keep[columns], energy, CONVERGED * first_energies[i])
            difference[columns] -= change
            gain = gain + (change * (slope + residual)).sum()  # x (2 g - G x)^T
        if least_gain and bool(gain < least_gain * objective):
            break
    return weight - difference.T


def _solved_in_mask(
    matrix: Float[Tensor, "in in"],
    residual: Float[Tensor, "in out"],
    keep: Bool[Tensor, "in out"],
    energy: Float[Tensor, " out"],
    smallest_energy: Float[Tensor, " out"],
) -> Float[Tensor, "in out"]:
    """Solve G_MM x = r of each column by conjugate gradients with the diagonal as preconditioner (algorithm 11.5.1).

    Args:
        residual: r, zero outside of the mask; it becomes r - (G x)_M.
        energy: r^T r / diag(G).
        smallest_energy: rows with less have converged.
    """
    scale = matrix.diagonal().reciprocal()[:, None]
    solution, direction = torch.zeros_like(residual), residual * scale
    for _ in range(STEPS):
        image = (matrix @ direction).mul_(keep)
        curvature = (direction * image).sum(0)
        length = torch.where((energy > smallest_energy) & (curvature > 0), energy / curvature, 0)
        solution.addcmul_(length, direction)
        residual.addcmul_(length, image, value=-1)
        scaled = residual * scale
        old_energy, energy = energy, (residual * scaled).sum(0)
        direction.mul_(torch.where(old_energy > smallest_energy, energy / old_energy, 0)).add_(scaled)
    return solution


def repaired_in_mask_bytes(rows: int, width: int) -> int:
    """Return the peak memory of `repaired_in_mask` in bytes: the Hessian, four weights, and six blocks."""
    return 4 * width * width + 4 * (4 * width + 6 * BLOCK) * rows
