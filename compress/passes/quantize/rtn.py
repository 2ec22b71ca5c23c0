"""Round to nearest: every weight to the nearest value of the grid, without data. The baseline of quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import Grid
from compress.numerics.quant.rounding import round_weighted
from compress.passes.contract.counted_work import CountedWork
from compress.passes.contract.facts import Requirements
from compress.passes.contract.layers import Layer
from compress.passes.contract.observers import Nothing
from compress.passes.families.quantizing import QuantizingPass
from compress.roofline.work import Work

TINY = 1e-30
LEAST_SHARE = 1e-6
"""Of the mean importance: the least importance of an input, so that no error is free."""


class RTN(CountedWork, QuantizingPass):
    """Round each weight to the nearest value of the grid; needs no calibration text.

    With block_rows, some rows share their scales: blocks of rows and columns, or, with group_size: channel, groups of
    output rows. Shen 2020 (arXiv 1909.05840, figure 4) has such groups: one range for the rows of each head, or for
    fewer. The scale of a group is stored for each of its rows.
    """

    use_for: ClassVar[str] = "8 bits, FP8, and a first look: it takes seconds and reads no calibration text."
    not_for: ClassVar[str] = "4 bits and fewer: gptq takes minutes and loses far less."
    paper: ClassVar[str] = "https://arxiv.org/abs/1712.05877"  # Jacob 2018, section 2.1
    chooses_runs: ClassVar[bool] = True

    block_rows: int = Field(
        default=1,
        gt=0,
        description="rows that share their scales: 128 with group_size 128 gives blocks of 128 x 128; with group_size: "
        "channel, one scale for all weights of that many rows",
    )

    imatrix: Path | None = Field(
        default=None,
        description="file of an importance matrix of llama.cpp (.gguf or .dat): scales have the least error weighted "
        "by the mean squares of the inputs (scale: importance, its default then)",
    )

    @property
    def requires(self) -> Requirements:
        return replace(super().requires, imatrix=None if self.imatrix is None else str(self.imatrix))

    @classmethod
    def of_grid(cls, grid: Grid, options: Mapping[str, Any]) -> dict[str, Any]:
        defaults = super().of_grid(grid, options)
        return defaults | ({"scale": "importance"} if options.get("imatrix") is not None else {})

    @property
    def weighs_columns(self) -> bool:
        return self.imatrix is not None

    def without_effect(self) -> dict[str, str]:
        weighted = self.imatrix is None or self.scale == "importance"
        idle = {} if weighted else {"imatrix": "it weighs the search scale: importance; write that, or leave it out"}
        return super().without_effect() | idle

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.imatrix is not None and self.block_rows > 1:
            raise ValueError("imatrix: does not weigh rows that share their scales; leave block_rows out")
        if self.block_rows > 1 and self.group_size == "tensor":
            raise ValueError(
                "block_rows needs a group_size in columns, such as group_size: 128, or group_size: channel"
            )
        if self.block_rows > 1 and self.grid.group_size is not None:
            raise ValueError(
                f"block_rows is not possible with weights {self.weights}, whose groups are fixed; use fp8_e4m3"
            )

    @property
    def scale_rows(self) -> int:
        return self.block_rows

    def work(self, shape: tuple[int, int]) -> Work:
        return Work(roundings=(self.tries + 1) * shape[0] * shape[1])

    def nearest(self, weight: Float[Tensor, "out in"], layer: Layer) -> Codes:
        importance = None if self.imatrix is None else layer.importance(str(self.imatrix), weight.shape[1])
        if importance is None:
            return super().nearest(weight, layer)
        # only the ratios count; an input that the text never reaches still counts a little
        importance = importance.to(weight.device) / importance.mean().clamp(min=TINY)
        options = replace(self.grid_options(layer), importance=importance.clamp(min=LEAST_SHARE))
        codes, source = round_weighted(weight if layer.mask is None else weight * layer.mask, options), layer.source()
        return (None if source is None else source.kept(weight, codes)) or codes

    def codes(self, weight: Float[Tensor, "out in"], statistics: Nothing, layer: Layer) -> Codes:
        return self.nearest(weight, layer)
