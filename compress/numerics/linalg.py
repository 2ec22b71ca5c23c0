"""Regularized Hessians, the factorization of their inverse that the column sweep needs, and systems of equations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.errors import NumericError

DAMPING = 0.01  # GPTQ, section 3.3, step 3; SparseGPT, appendix A: relative to the mean of the diagonal
ESCALATION = 10.0  # each retry multiplies the damping by this
RETRIES = 4
SHRINKAGE = 0.1  # measured best of 0 to 0.2 on text of the calibration text's kind (eval/LOG.md)
SMALL = 128  # triangular matrices up to this width are inverted in one call; measured best of 64, 128, 256
SINGULAR = 8.0  # rounding errors: a smaller pivot, relative to its diagonal entry, is that of a singular matrix
GPU_SMALL = 1024  # width on a GPU, where launches dominate small products


@dataclass(frozen=True)
class Regularization:
    """Regularization against overfitting of few calibration tokens: H' = (1 - s) H + s diag(H) + d mean(diag H) I.

    Attributes:
        damping: d > 0, relative to the mean of the diagonal (GPTQ, Frantar 2022, section 3.3, step 3).
        shrinkage: s, from 0 to below 1, of the correlations between channels; variances do not change (Schaefer and
            Strimmer 2005, target D).
    """

    damping: float = DAMPING
    shrinkage: float = SHRINKAGE


def shrink_(hessian: Float[Tensor, "n n"], shrinkage: float) -> Float[Tensor, "n n"]:
    """Multiply the entries outside of the diagonal by 1 - shrinkage, in place."""
    if shrinkage:
        diagonal = hessian.diagonal().clone()
        hessian.mul_(1 - shrinkage).diagonal().copy_(diagonal)
    return hessian


def inverse_factor(hessian: Float[Tensor, "n n"], damping: float) -> tuple[Float[Tensor, "n n"], float]:
    """Compute the upper Cholesky factor U of the inverse: inv(H + damping * mean(diag H) * I) = U^T U.

    The mean is that of the channels that are not dead (zero on the diagonal): they would lower it, and with it the
    damping of the others. GPTQ (Frantar 2022), section 3.3, step 3. A dead channel, whose row and column are zero, gets
    a small diagonal, `DAMPING` of the mean: it neither gives nor receives compensation, and pruning takes it first.

    Each damping is tried in float32, then in float64. While the matrix is not positive definite, the damping is
    multiplied by ten.

    Args:
        hessian: H.
        damping: relative to the mean of the diagonal.

    Returns:
        (U, the damping that worked).

    Raises:
        NumericError: if the matrix is not finite, or if 10^4 times the damping does not suffice.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise NumericError("the Hessian of the layer's inputs holds NaN or infinity")
    hessian, mean = _alive(hessian)
    used = damping
    for _ in range(RETRIES + 1):
        damped = hessian.clone()
        damped.diagonal().add_(used * mean)
        for dtype in (torch.float32, torch.float64):
            factor = _upper_of_inverse(damped.to(dtype))
            if factor is not None:
                return factor.to(torch.float32), used
        used *= ESCALATION
    raise NumericError(f"the Hessian is not positive definite even with a damping of {used / ESCALATION:g}")


def damped(hessian: Float[Tensor, "n n"], damping: float) -> Float[Tensor, "n n"]:
    """Return the matrix whose inverse `inverse_factor` factors, a new tensor."""
    hessian, mean = _alive(hessian)
    return hessian + torch.diag((damping * mean).expand(len(hessian)))


def _alive(hessian: Float[Tensor, "n n"]) -> tuple[Float[Tensor, "n n"], Float[Tensor, ""]]:
    """Return the matrix with a small diagonal for dead channels, and the mean of the diagonal of the other channels."""
    mean, dead = hessian.diagonal().mean(), hessian.diagonal() == 0
    if bool(dead.any()) and not bool(dead.all()):
        mean = hessian.diagonal()[~dead].mean()
        hessian = hessian + torch.diag(dead * (DAMPING * mean))
    return hessian, mean


def factor_bytes(width: int) -> int:
    """Return the peak memory of `inverse_factor` in bytes, with its float32 matrix: 4.5 times the size of the matrix.

    Matrix, damped matrix, flipped Cholesky factor, its inverse, and blocks of the inverse.
    """
    return 18 * width * width


def _upper_of_inverse(matrix: Tensor) -> Tensor | None:
    """Compute the upper Cholesky factor of the inverse; None if the factorization fails or is not finite.

    The matrix is factored from the last row up, H = R R^T with R upper; then inv(H) = U^T U with U = inv(R). This
    avoids computing inv(H) itself and factoring it.
    """
    lower, info = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    if int(info):
        return None
    flipped = lower.flip(0, 1)
    del lower  # memory for the inverse
    upper = inverse_of_upper(flipped)
    return upper if bool(torch.isfinite(upper).all()) else None


def inverse_of_upper(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Invert an upper triangular matrix by halves: a third of the work of solving for the identity."""
    size = matrix.shape[0]
    if size <= (GPU_SMALL if matrix.device.type == "cuda" else SMALL):
        eye = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        return torch.linalg.solve_triangular(matrix, eye, upper=True)
    half = size // 2
    # inv([[A, B], [0, D]]) = [[inv(A), -inv(A) B inv(D)], [0, inv(D)]]
    inverse = torch.zeros_like(matrix)
    upper_left = inverse[:half, :half] = inverse_of_upper(matrix[:half, :half])
    lower_right = inverse[half:, half:] = inverse_of_upper(matrix[half:, half:])
    inverse[:half, half:] = (upper_left @ matrix[:half, half:]).neg_() @ lower_right
    return inverse


def solve_positive(
    matrices: Float[Tensor, "*batch n n"], right_side: Float[Tensor, "*batch n k"]
) -> tuple[Float[Tensor, "*batch n k"], Bool[Tensor, "*batch"]]:
    """Solve M x = b for symmetric positive definite matrices, by their Cholesky factors.

    Batches of LU factors are wrong in torch on the CPU above 150 rows when `torch.set_num_threads` was called:
    https://github.com/pytorch/pytorch/issues/142815

    Returns:
        (x, is_solved). `is_solved` is False for a matrix that is not positive definite up to rounding errors; its x has
        no meaning.
    """
    lower, info = torch.linalg.cholesky_ex(matrices)
    pivots, diagonal = lower.diagonal(dim1=-2, dim2=-1).square(), matrices.diagonal(dim1=-2, dim2=-1)
    is_regular = (pivots > SINGULAR * torch.finfo(matrices.dtype).eps * diagonal).all(-1)
    return torch.cholesky_solve(right_side, lower), (info == 0) & is_regular


def solve_general(matrix: Float[Tensor, "n n"], right_side: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Solve M x = b for one matrix, by its LU factors.

    Batches are refused, for the reason that `solve_positive` gives.

    Raises:
        torch.linalg.LinAlgError: if the matrix is singular.
    """
    assert matrix.ndim == 2, "a batch of LU factors can be wrong"
    return torch.linalg.solve(matrix, right_side)
