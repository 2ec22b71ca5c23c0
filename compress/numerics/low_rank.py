"""Low-rank approximation of a matrix, without weights or weighted by the covariance of inputs."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def truncated_svd(matrix: Float[Tensor, "out in"], rank: int) -> tuple[Float[Tensor, "out r"], Float[Tensor, "r in"]]:
    """Compute B A nearest to the matrix in the Frobenius norm (Eckart & Young 1936).

    Singular values are shared evenly: B = U_r S_r^1/2, A = S_r^1/2 V_r^T (ZeroQuant-V2, Yao 2023, section 4, equation
    2).

    Returns:
        (B, A).
    """
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * v[:rank]


def weighted_svd(
    error: Float[Tensor, "out in"], factor: Float[Tensor, "in in"], rank: int
) -> tuple[Float[Tensor, "out r"], Float[Tensor, "r in"]]:
    """Minimize ||(E - B A) X||^2 over all B A of this rank.

    X X^T = L L^T with L = inv(U), so B and A L are the truncated SVD of E L. EoRA (Liu 2024, arXiv 2410.21271, section
    3) uses another root of X X^T, Q Lambda^1/2 of its eigendecomposition. LQER (Zhang 2024, arXiv 2402.02446) uses a
    diagonal approximation of L.

    Args:
        error: E.
        factor: U with inv(X X^T) = U^T U.
        rank: rank of B A.

    Returns:
        (B, A).
    """
    b, a = truncated_svd(_times_root(error, factor), rank)
    return b.to(error.dtype), (a @ factor.double()).to(error.dtype)


def refitted(
    error: Float[Tensor, "out in"], a: Float[Tensor, "r in"], factor: Float[Tensor, "in in"] | None
) -> Float[Tensor, "out r"]:
    """Minimize ||(E - B A) X||^2 over B for a fixed A.

    Args:
        error: E.
        a: A.
        factor: as of `weighted_svd`; None: X X^T = I.

    Returns:
        B.
    """
    dtype = error.dtype
    error, a = (error.double(), a.double()) if factor is None else (_times_root(error, factor), _times_root(a, factor))
    return torch.linalg.lstsq(a.T, error.T).solution.T.to(dtype)


def _times_root(matrix: Float[Tensor, "rows in"], factor: Float[Tensor, "in in"]) -> Float[Tensor, "rows in"]:
    """Return the matrix times inv(factor), in float64, so that rounded results do not depend on the order of sums."""
    return torch.linalg.solve_triangular(factor.double(), matrix.double(), upper=True, left=False)
