"""Low-rank approximation of an error, plainly or weighed by the covariance of the inputs."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compress.errors import NumericError


def truncated_svd(matrix: Float[Tensor, "out in"], rank: int) -> tuple[Float[Tensor, "out r"], Float[Tensor, "r in"]]:
    """(B, A) with B A nearest to the matrix in the Frobenius norm (Eckart & Young 1936); singular values shared evenly.

    B = U_r S_r^1/2, A = S_r^1/2 V_r^T  (ZeroQuant-V2, Yao 2023, section 4, equation 2).
    """
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * v[:rank]


def covariance_root(hessian: Float[Tensor, "in in"], damping: float) -> Float[Tensor, "in in"]:
    """L, lower triangular, with L L^T = H + damping * mean(diag H) * I, in float64. Raises NumericError."""
    damped = hessian.double()
    damped = damped + damping * damped.diagonal().mean() * torch.eye(
        len(damped), dtype=damped.dtype, device=damped.device
    )
    lower, info = torch.linalg.cholesky_ex(damped)
    if int(info) or not bool(lower.isfinite().all()):
        raise NumericError("the covariance of the layer's inputs is not positive definite; raise damping")
    return lower


def weighted_svd(
    error: Float[Tensor, "out in"], root: Float[Tensor, "in in"], rank: int
) -> tuple[Float[Tensor, "out r"], Float[Tensor, "r in"]]:
    """(B, A) that minimize ||(E - B A) X||^2 with X X^T = L L^T: the SVD of E L, taken back by inv(L).

    EoRA (Liu 2024, arXiv 2410.21271, section 3) projects by Q Lambda^1/2 of the eigendecomposition, which is another
    root of the same matrix, and LQER (Zhang 2024, arXiv 2402.02446) keeps its diagonal alone. root: L.
    """
    b, a = truncated_svd(error.double() @ root, rank)
    a = torch.linalg.solve_triangular(root, a, upper=False, left=False)  # A L = a
    return b.to(error.dtype), a.to(error.dtype)


def refitted(
    error: Float[Tensor, "out in"], a: Float[Tensor, "r in"], root: Float[Tensor, "in in"] | None
) -> Float[Tensor, "out r"]:
    """The B that minimizes ||(E - B A) X||^2 for a fixed A, say a rounded one; root: of X X^T, None: X = I."""
    e, a = error.double(), a.double()
    e, a = (e, a) if root is None else (e @ root, a @ root)
    return torch.linalg.lstsq(a.T, e.T).solution.T.to(error.dtype)
