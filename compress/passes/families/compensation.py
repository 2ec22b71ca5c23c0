"""Passes whose kept or rounded weights compensate errors: the Hessian of the inputs, and the output that is fitted."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.numerics.linalg import DAMPING, SHRINKAGE, Regularization, factor_operations
from compress.passes.contract.counted_work import CountedWork
from compress.passes.contract.observers import CrossGram, Gram, Observer, UnitCrossGram, UnitGram
from compress.passes.contract.options import Options
from compress.passes.contract.passes import LayerPass
from compress.roofline.work import Work

ALPHA = 0.25  # as other programs: the whole correction fits the calibration tokens too closely


class Regularized(Options):
    """The options of passes that invert the Hessian of a layer's inputs."""

    damping: float = Field(
        default=DAMPING, gt=0, le=1, description="added to the diagonal of the Hessian, relative to its mean"
    )
    shrinkage: float = Field(
        default=SHRINKAGE,
        ge=0,
        lt=1,
        description="correlations between channels in the Hessian are multiplied by 1 - shrinkage, so that the layer "
        "fits the calibration text less closely; 0: as in the papers",
    )

    @property
    def regularization(self) -> Regularization:
        """What keeps the Hessian from fitting the calibration tokens alone."""
        return Regularization(self.damping, self.shrinkage)


class CompensatingPass(CountedWork, Regularized, LayerPass):
    """A layer pass that fits the layer's output on the calibration inputs.

    Attributes:
        normalizes: whether tokens are normalized unless the recipe says otherwise.
        error: 'asymmetric' minimizes ||W X~ - Q X||^2, with X~ the inputs in the uncompressed model and X the inputs in
            the compressed model (GPTAQ, arXiv 2504.02692, equation 6). The optimal weight without rounding is V = W X~
            X^T inv(X X^T), and ||W X~ - Q X||^2 = ||V X - Q X||^2 + a constant. V fits the calibration tokens closely,
            so the pass starts from W + alpha (V - W).
    """

    normalizes: ClassVar[bool] = True

    normalize_tokens: bool | None = Field(
        default=None,
        description="divide each token's input by its norm in the Hessian, so that tokens with small inputs, such as "
        "attention sinks after a norm, count as much as others; default: false for pruning, otherwise true",
    )
    error: Literal["symmetric", "asymmetric"] = Field(
        default="symmetric",
        description="target of the layer's output: 'symmetric': of the original weight on the same inputs; "
        "'asymmetric': of the uncompressed model, which runs too (GPTAQ)",
    )
    alpha: float = Field(
        default=ALPHA,
        gt=0,
        le=1,
        description="only for error: asymmetric: factor of the correction of the weight; 1: the whole, as in the paper",
    )

    def without_effect(self) -> dict[str, str]:
        idle = {"alpha": "with error: symmetric; leave it out, or use error: asymmetric"}
        return super().without_effect() | (idle if self.error == "symmetric" else {})

    @property
    def hessian(self) -> type[Gram]:
        """The statistics of the inputs by which errors are compensated."""
        normalized = self.normalizes if self.normalize_tokens is None else self.normalize_tokens
        if self.error == "symmetric":
            return UnitGram if normalized else Gram
        return UnitCrossGram if normalized else CrossGram

    @property
    def observer(self) -> type[Observer]:
        return self.hessian

    def shared_work(self, width: int) -> Work:
        """Count the factor of the inverse Hessian, and with an asymmetric error `CrossGram.shift`, two products."""
        shift = 0 if self.error == "symmetric" else 4 * width**3
        return Work(factors=factor_operations(width), updates=shift, elements=8 * width**2)

    def sweep_work(self, shape: tuple[int, int]) -> Work:
        """Count a sweep over the columns, each of which updates all later ones: n^2 / 2 products for each row."""
        weights = shape[0] * shape[1]
        return Work(updates=weights * shape[1], columns=weights)

    def fitted_work(self, shape: tuple[int, int]) -> Work:
        """Count the product of the weight in `fitted`."""
        return Work() if self.error == "symmetric" else Work(updates=2 * shape[0] * shape[1] ** 2)

    def fitted(
        self, weight: Float[Tensor, "out in"], statistics: Any, order: Tensor | None = None
    ) -> Float[Tensor, "out in"]:
        """Return the weight to start from.

        Args:
            order: of the columns in the factor that the pass uses.
        """
        if not isinstance(statistics, CrossGram):
            return weight
        # argmin_V ||W X~ - V X||^2 = W X~ X^T inv(X X^T) = W + W (X~ - X) X^T inv(X X^T)
        weight = weight.float()
        return torch.addmm(weight, weight, statistics.shift(self.regularization, order), alpha=self.alpha)
