"""GPTQ: round column by column; later columns compensate the error (Frantar 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.numerics.column_sweep import PART
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.refine import TURNS, refine_bytes, refined
from compress.numerics.quant.rounding import round_columns, rounding_bytes
from compress.numerics.quant.run_rounding import refined_runs, round_runs, rounding_bytes_of_runs, run_order
from compress.numerics.quant.weighted_search import importance_of
from compress.passes.contract.facts import Requirements
from compress.passes.contract.layers import Layer
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.compensation import CompensatingPass
from compress.passes.families.quantizing import QuantizingPass, ScaleOption
from compress.roofline.work import Work


class GPTQ(CompensatingPass, QuantizingPass):
    """Quantize the columns of a weight one after the other; the remaining columns compensate each rounding error.

    Minimize ||W X - Q X||^2 greedily over columns; later columns compensate the error of each column. The paper takes
    columns from left to right, covers the range of each group, and does not normalize tokens (act_order: none, scale:
    absmax, refine: 0, normalize_tokens: false; recipe `gptq-paper`). The defaults lose less.

    act_order sets the order of the columns:

    - none: from left to right.
    - static: columns with large inputs first; the groups and their scales are fixed before the sweep.
    - group: the same order, in which the groups are formed too, so an index per column is stored.

    error: 'asymmetric' fits the output of the uncompressed model (GPTAQ, arXiv 2504.02692). The sweep then starts
    between the weight and the weight that fits this output best without rounding, at `alpha` of the way. GPTAQ adds the
    same correction column by column, but omits its part in columns that are already rounded.
    """

    use_for: ClassVar[str] = (
        "2 to 8 bits for weights. It is the default of nearly every scheme, and takes minutes for a small model."
    )
    not_for: ClassVar[str] = (
        "Runs without calibration text, where rtn and hqq need none. 2 bits alone: follow it by distill."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2210.17323"
    chooses_runs: ClassVar[bool] = True
    act_order: Literal["none", "static", "group"] = Field(
        default="static",
        description="order of quantizing: 'none': left to right; 'static': columns with large inputs first; 'group': "
        "the same, with groups formed in that order",
    )
    scale: ScaleOption = Field(
        default="importance",
        description="as for rtn; 'importance': the least error as the sweep weighs it; other defaults: 'absmean' for "
        "ternary and binary, 'mse' for group_size: tensor",
    )
    refine: int = Field(
        default=1,
        ge=0,
        le=100,
        description="rounds after the sweep: scales by least squares given the codes, then each code again given all "
        "others; the error of no row increases",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.act_order == "group" and not isinstance(self.group_size, int):
            needs = f"act_order: group needs a number as group_size, not {self.group_size!r}"
            raise ValueError(f"{needs}; write act_order: static")
        if self.act_order == "group" and self.grid.run > 1:
            message = f"act_order: group separates the columns that {self.weights} encodes together"
            raise ValueError(f"{message}; write act_order: static")

    @property
    def requires(self) -> Requirements:
        by_rows = self.group_size != "tensor" and not self.grid.scaling.shared_count(1, 1)
        return replace(super().requires, by_rows=by_rows)

    @property
    def indexed(self) -> bool:
        return self.act_order == "group"

    @property
    def weighs_columns(self) -> bool:
        return True

    def memory(self, size: ProblemSize) -> int:
        if self.grid.run > 1:
            return super().memory(size) + rounding_bytes_of_runs(*size.shape)
        refining = refine_bytes(*size.shape) if self.refine else 0
        return max(super().memory(size), size.cast_bytes + max(rounding_bytes(*size.shape), refining))

    def work(self, shape: tuple[int, int]) -> Work:
        weights, width = shape[0] * shape[1], shape[1]
        # every column updates all later ones: n^2 / 2 products for each row
        sweep = Work(updates=weights * width, columns=weights, roundings=self.tries * weights)
        # the product of W - Q and H, and in each turn the image of the levels and the changes of the slope in a part
        updates = 2 * weights * width + TURNS * 2 * 2 * PART * weights
        descent = Work(updates=updates, columns=TURNS * weights, elements=8 * width**2 + TURNS * 8 * weights)
        return self.fitted_work(shape) + sweep + descent * self.refine

    def codes(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Codes:
        order = None
        if self.act_order != "none":
            order = run_order(statistics.diagonal, self.grid.run)
        factor = statistics.factor_of(layer.name, layer.log, self.regularization, order)
        weight = self.fitted(weight.float(), statistics, order)
        options = self.grid_options(layer)
        if self.scale == "importance":
            options = replace(options, importance=importance_of(factor, order))
        if self.grid.run > 1:
            codes = round_runs(weight, factor, options, order)
            hessian = statistics.damped(self.regularization, order)
            return refined_runs(weight, codes, hessian, self.refine, order)
        codes = round_columns(weight, factor, options, layer.mask, order, regroup=self.indexed).codes
        if not self.refine:
            return codes
        hessian = statistics.damped(self.regularization, order)
        weight = weight if layer.mask is None else weight * layer.mask
        return refined(weight, codes, hessian, self.refine, layer.storage, layer.mask, order, self.signed(layer))
