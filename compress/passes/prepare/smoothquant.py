"""SmoothQuant: move outliers of activations into the weights, which are easier to round (Xiao 2022)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.layers.linear import CompressedLinear
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.observers import InputAbsMax
from compress.passes.contract.samples import Rows
from compress.passes.families.equalizing import EqualizingPass, Readers, smoothing, weight_absmax

SEARCHED = tuple(i / 20 for i in range(21))  # candidates of alpha: search; each one costs one rounding of the readers


class SmoothQuant(EqualizingPass):
    """Move outliers from activations into weights, so that activations can be quantized; a quantizing pass follows.

    Divide each input channel by s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), and multiply the weights by it. The
    division is folded into the module that writes the input: a norm, or a linked linear. Each fold is verified in
    float32, and undone if it changes the block's output. Linears without a link are not smoothed, or, with unlinked:
    scale, divide their inputs at run time (format native stores such a scale).

    alpha: 'search' tries 0, 0.05, ... 1, and no smoothing, for each link. It takes the value with the least error of
    the outputs of the linears that read the input, with weights in int8 per row and inputs in int8 per token, on a few
    hundred tokens.
    """

    use_for: ClassVar[str] = "Activations in 8 bits (W8A8), before gptq or rtn."
    not_for: ClassVar[str] = "Weight-only quantization: it makes weights harder to round."
    paper: ClassVar[str] = "https://arxiv.org/abs/2211.10438"

    alpha: Annotated[float, Field(ge=0, le=1)] | Literal["search"] = Field(
        default=0.5,
        description="migration strength: larger values move more of the range to the weights; 'search': best per link",
    )

    @property
    def statistics(self) -> type[InputAbsMax]:
        return Rows if self.alpha == "search" else InputAbsMax

    def scale(self, readers: Readers) -> Float[Tensor, " in"] | None:
        ranges = readers.equalize(readers.absmax), readers.equalize(weight_absmax(readers.block, readers.names))
        if isinstance(self.alpha, float):
            return readers.equalize(smoothing(*ranges, self.alpha))
        return self.search(readers, ranges)

    def search(
        self, readers: Readers, ranges: tuple[Float[Tensor, " in"], Float[Tensor, " in"]]
    ) -> Float[Tensor, " in"]:
        """Return the scale with the least error of the rounded readers; ones if no smoothing is best."""
        trials: dict[float | None, Tensor] = {None: torch.ones_like(ranges[0])}
        trials |= {alpha: readers.equalize(smoothing(*ranges, alpha)) for alpha in SEARCHED}
        errors = dict.fromkeys(trials, 0.0)
        for group, observer in readers.statistics.items():
            rows = observer.rows
            if rows is None:
                continue
            for name in group.linears:
                weight = CompressedLinear.of(readers.block.get_submodule(name)).weight.float()
                outputs = rows @ weight.T
                for alpha, scale in trials.items():
                    errors[alpha] += rounded_error(rows, weight, scale, outputs)
        best = min(errors, key=lambda alpha: errors[alpha])
        figures = {"alpha": best, "error": errors[best] ** 0.5, "unsmoothed": errors[None] ** 0.5}
        readers.log("note", f"{readers.where}: the best of {len(trials)} scales", **figures)
        return trials[best]


def rounded_error(
    rows: Float[Tensor, "rows in"],
    weight: Float[Tensor, "out in"],
    scale: Float[Tensor, " in"],
    outputs: Float[Tensor, "rows out"],
) -> float:
    """||Q(X / s) Q(W s)^T - X W^T||^2 / ||X W^T||^2 with int8 per token and per row (W8A8)."""
    grid = GRIDS["int8"]
    rounded_outputs = InputRounding.of(grid)(rows / scale) @ quantize(weight * scale, grid, "channel").dense().T
    return float((rounded_outputs - outputs).square().sum() / outputs.square().sum().clamp(min=1e-30))
