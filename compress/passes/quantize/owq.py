"""OWQ: GPTQ, but the few input columns with the largest rounding error stay in 16 bits (Lee 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from compress.layers.base import WeightPart
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.outliers import OutliersPart, OutliersScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.linalg import solve_positive
from compress.numerics.quant.refine import refine_bytes, refined
from compress.numerics.quant.rounding import round_columns, rounding_bytes
from compress.numerics.quant.weighted_search import importance_of
from compress.passes.contract.facts import Effects
from compress.passes.contract.layers import Layer
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.compensation import CompensatingPass
from compress.passes.families.quantizing import QuantizingPass, ScaleOption

VALUE_BITS, INDEX_BITS = 16, 32  # storage of an outlier column: a 16-bit float per row, and its index
BUDGET = 0.1  # section 5: OWQ at 3.1 bits is compared with OPTQ at 4


class OWQ(CompensatingPass, QuantizingPass):
    """Keep the most sensitive input columns in 16 bits, and quantize the others with GPTQ.

    Keep the columns with the largest lambda_j = H_jj ||w_j - Q(w_j)||^2 in 16 bits; quantize the others by GPTQ. The
    outlier columns are fitted to the errors of all others by least squares, as by the end of the paper's sweep, and no
    scale needs to cover them (sections 3.2 and 3.3). Their codes decode to zero.

    The paper chooses scales by the squared error of the weights, does not normalize tokens, and has one sweep (scale:
    mse, normalize_tokens: false, refine: 0).
    """

    use_for: ClassVar[str] = (
        "3 bits with some tenths of a bit to spare: the input columns that rounding harms most stay in 16 bits."
    )
    not_for: ClassVar[str] = "Formats other than native."
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.02272"

    budget: float = Field(
        default=BUDGET,
        gt=0,
        lt=16,
        description="bits per weight for outlier columns, in addition to the codes; at least one column",
    )
    outlier_dtype: Literal["float16", "bfloat16"] = Field(default="float16", description="dtype of the outlier columns")
    order: Literal["natural", "static"] = Field(
        default="static",
        description="order of the other columns in the sweep; 'static': columns with large inputs first",
    )
    scale: ScaleOption = Field(
        default="importance", description="scale search, as for gptq; 'mse' clips as in the paper"
    )
    refine: int = Field(
        default=1,
        ge=0,
        le=100,
        description="rounds after the sweep: scales and codes as for gptq, and the outlier columns again",
    )

    def columns_of(self, shape: tuple[int, int]) -> int:
        """Return the number of outlier columns of a layer (out, in) within the budget, at least one."""
        rows, width = shape
        return max(1, int(self.budget * rows * width / (VALUE_BITS * rows + INDEX_BITS)))

    def effects(self, layer: LayerScheme) -> Effects:
        effects = super().effects(layer)
        outliers = OutliersScheme(self.columns_of(layer.shape), "column", self.outlier_dtype)
        return replace(effects, scheme=effects.scheme.with_parts(*effects.scheme.parts, outliers))

    @property
    def weighs_columns(self) -> bool:
        return True

    def memory(self, size: ProblemSize) -> int:
        refining = refine_bytes(*size.shape) if self.refine else 0
        return max(super().memory(size), size.cast_bytes + max(rounding_bytes(*size.shape), refining))

    def codes(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> list[WeightPart]:
        chosen = self.weak_columns(weight.float(), statistics, layer)
        is_quantized = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
        is_quantized[chosen] = False
        order = self._order(statistics, is_quantized, chosen)
        factor = statistics.factor_of(layer.name, layer.log, self.regularization, order)
        weight = self.fitted(weight.float(), statistics, order)
        weight = weight if layer.mask is None else weight * layer.mask
        mask = is_quantized.expand(weight.shape) if layer.mask is None else layer.mask & is_quantized
        options = self.grid_options(layer)
        if self.scale == "importance":
            options = replace(options, importance=importance_of(factor, order))
        codes = round_columns(weight, factor, options, mask, order).codes
        hessian = statistics.damped(self.regularization, order)
        values = self._fit(weight - codes.dense(), hessian, chosen, layer)
        for _ in range(self.refine):
            remaining = weight.index_add(1, chosen, values, alpha=-1)
            codes = refined(remaining, codes, hessian, 1, layer.storage, mask, order, self.signed(layer))
            values = self._fit(weight - codes.dense(), hessian, chosen, layer)
        outliers = OutliersPart.of_columns(chosen, values, weight.shape[1], self.outlier_dtype)
        return [CodesPart.of(codes), outliers]

    def _fit(
        self,
        difference: Float[Tensor, "out in"],
        hessian: Float[Tensor, "in in"],
        columns: Int[Tensor, " n"],
        layer: Layer,
    ) -> Float[Tensor, "out n"]:
        """Return the outlier columns V that minimize (D - V) H (D - V)^T of each row of the difference D = W - Q."""
        # V = D_o + D_r H_ro inv(H_oo) = D H_:o inv(H_oo), with D = [D_r, D_o]
        rows = hessian[columns]
        solution, is_solved = solve_positive(rows[:, columns], rows @ difference.T)
        if not bool(is_solved):
            layer.log("fallback", "the outlier columns are not fitted: their Hessian is singular")
        values = solution.T if bool(is_solved) else difference[:, columns]
        return values if layer.mask is None else values * layer.mask[:, columns]

    def weak_columns(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Int[Tensor, " n"]:
        """Return the indices of the columns with the largest sensitivity, in ascending order."""
        rounded = self.nearest(weight, layer).dense()
        # lambda_j = H_jj ||w_j - Q(w_j)||^2  (equation 4)
        sensitivity = statistics.diagonal * (weight - rounded).square().sum(0)
        return sensitivity.topk(self.columns_of((weight.shape[0], weight.shape[1]))).indices.sort().values

    def _order(self, statistics: Gram, is_quantized: Tensor, chosen: Int[Tensor, " n"]) -> Int[Tensor, " in"]:
        """Return the rounded columns, then the outlier columns."""
        columns = is_quantized.nonzero()[:, 0]
        if self.order == "static":
            columns = columns[statistics.diagonal[columns].argsort(descending=True, stable=True)]
        return torch.cat([columns, chosen])
