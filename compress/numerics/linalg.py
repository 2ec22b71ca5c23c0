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
STRIP = 1024  # rows or columns of a product with a triangular matrix
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
    if not all(bool(torch.isfinite(rows).all()) for rows in hessian.split(SMALL)):
        raise NumericError("the Hessian of the layer's inputs holds NaN or infinity")
    diagonal, mean = _alive(hessian.diagonal())
    used = damping
    for _ in range(RETRIES + 1):
        for dtype in (torch.float32, torch.float64):
            factor = _upper_of_inverse(hessian, diagonal + used * mean, dtype)
            if factor is not None:
                return factor.to(torch.float32), used
        used *= ESCALATION
    raise NumericError(f"the Hessian is not positive definite even with a damping of {used / ESCALATION:g}")


def damped(hessian: Float[Tensor, "n n"], damping: float) -> Float[Tensor, "n n"]:
    """Return the matrix whose inverse `inverse_factor` factors, a new tensor."""
    return damped_(hessian.clone(), damping)


def damped_(hessian: Float[Tensor, "n n"], damping: float) -> Float[Tensor, "n n"]:
    """Replace a matrix by the one whose inverse `inverse_factor` factors."""
    diagonal, mean = _alive(hessian.diagonal())
    hessian.diagonal().copy_(diagonal + damping * mean)
    return hessian


def _alive(diagonal: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
    """Return the diagonal with small values for dead channels, and the mean of the other channels."""
    mean, dead = diagonal.mean(), diagonal == 0
    if bool(dead.any()) and not bool(dead.all()):
        mean = diagonal[~dead].mean()
        diagonal = diagonal + dead * (DAMPING * mean)
    return diagonal, mean


def factor_bytes(width: int) -> int:
    """Return the peak memory of `inverse_factor` in bytes, with its float32 matrix: at most 2.5 times its size.

    The matrix, its factor, which is inverted in place, and a strip of a product by which it is inverted.
    """
    return 8 * width * width + 2 * min(STRIP, (width + 1) // 2) * width


def factor_operations(width: int) -> float:
    """Return the operations of `inverse_factor`: a Cholesky factor, n^3 / 3, and the inverse of a triangle, n^3 / 3."""
    return 2 * width**3 / 3


def _upper_of_inverse(hessian: Tensor, diagonal: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Compute the upper Cholesky factor of the inverse; None if the factorization fails or is not finite.

    The matrix is factored from the last row up, H = R R^T with R upper; then inv(H) = U^T U with U = inv(R). This
    avoids computing inv(H) itself and factoring it.

    Args:
        hessian: H apart from its diagonal.
        diagonal: the diagonal of H.
        dtype: of the computation.
    """
    matrix = hessian.flip(0, 1).to(dtype)
    matrix.diagonal().copy_(diagonal.flip(0))
    # in place: the transpose of the symmetric matrix is the matrix, in the layout of LAPACK
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix.T, out=(matrix.T, info))
    if int(info):
        return None
    _anti_transpose_(matrix)  # the transposed lower factor of the flipped matrix becomes R
    inverse_of_upper_(matrix)
    return matrix if all(bool(torch.isfinite(rows).all()) for rows in matrix.split(SMALL)) else None


def _anti_transpose_(matrix: Float[Tensor, "n n"]) -> None:
    """Mirror a matrix at its other diagonal, in place: M[i, j] becomes M[n - 1 - j, n - 1 - i]."""
    size = len(matrix)
    for start in range(0, size, SMALL):
        stop = min(start + SMALL, size)
        middle = matrix[start:stop, size - stop : size - start]
        middle.copy_(middle.flip(0, 1).T)
        above, below = matrix[start:stop, : size - stop], matrix[stop:, size - stop : size - start]
        mirrored = above.flip(0, 1).T
        above.copy_(below.flip(0, 1).T)
        below.copy_(mirrored)


def inverse_of_upper(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Invert an upper triangular matrix."""
    inverse = matrix.clone()
    inverse_of_upper_(inverse)
    return inverse


def inverse_of_upper_(matrix: Float[Tensor, "n n"]) -> None:
    """Invert an upper triangular matrix in place, by halves: a third of the work of solving for the identity."""
    size = matrix.shape[0]
    if size <= (GPU_SMALL if matrix.device.type == "cuda" else SMALL):
        eye = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        by_column = matrix.T.contiguous().T  # the layout of LAPACK: the bits do not depend on that of the matrix
        matrix.copy_(torch.linalg.solve_triangular(by_column, eye, upper=True))
        return
    half = size // 2
    # inv([[A, B], [0, D]]) = [[inv(A), -inv(A) B inv(D)], [0, inv(D)]]
    upper_left, upper_right, lower_right = matrix[:half, :half], matrix[:half, half:], matrix[half:, half:]
    inverse_of_upper_(upper_left)
    inverse_of_upper_(lower_right)
    # strip by strip in place, without the zeros below the diagonals
    for start in range(0, half, STRIP):
        strip = slice(start, start + STRIP)
        upper_right[strip] = (upper_left[strip, start:] @ upper_right[start:]).neg_()
    for start in reversed(range(0, size - half, STRIP)):
        strip, stop = slice(start, start + STRIP), min(start + STRIP, size - half)
        upper_right[:, strip] = upper_right[:, :stop] @ lower_right[:stop, strip]


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
