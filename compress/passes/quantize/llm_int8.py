"""LLM.int8: 8-bit integer products, except for the few input columns with outliers (Dettmers 2022)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from compress.errors import NumericError
from compress.layers.base import WeightPart
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.outliers import OutliersPart, OutliersScheme
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.numerics.quant.codes import Codes
from compress.passes.contract.facts import Effects, MakeObserver
from compress.passes.contract.layers import Layer
from compress.passes.contract.observers import OutlierFrequency
from compress.passes.families.quantizing import InputGrid, QuantizingPass
from compress.passes.families.weight_grid import GridName, GroupSizeOption

THRESHOLD = 6.0  # section 3.2: smallest magnitude of an outlier; includes all outlier features of a 6.7B model


class LLMInt8(QuantizingPass):
    """Quantize weights and activations to int8, except the input columns with outliers.

    `outliers` chooses the columns:

    - runtime: in all tokens of each call.
    - calibrated: the columns in which more than `token_share` of the calibration tokens reach the threshold. Then a
      token's result does not depend on the other tokens of the call.

    Weights of outlier columns are dequantized from their codes, so no weight is stored twice; the paper multiplies them
    in 16 bits. `float_columns` stores that many columns in 16 bits, those in which most calibration tokens reach the
    threshold. Their weights are not rounded, and no scale needs to cover them.
    """

    use_for: ClassVar[str] = (
        "8-bit weights and activations without calibration text, for models whose inputs have outlier columns (6 "
        "billion weights and more). Checkpoints for bitsandbytes."
    )
    not_for: ClassVar[str] = "Speed: the columns in 16 bits cost time. smoothquant and gptq make a plain W8A8."
    paper: ClassVar[str] = "https://arxiv.org/abs/2208.07339"

    weights: GridName = Field(default="int8", description="number grid of the weights")
    group_size: GroupSizeOption = Field(
        default="channel", description="columns that share a scale; 'channel': the vector-wise rounding of the paper"
    )
    activations: InputGrid = Field(default="int8", description="grid of the other input columns")
    threshold: float = Field(
        default=THRESHOLD,
        gt=0,
        description="smallest magnitude of an outlier; 3 suits models of some hundred million weights",
    )
    outliers: Literal["runtime", "calibrated"] = Field(
        default="runtime",
        description="'runtime': find columns in each call; 'calibrated': find them once and store them",
    )
    token_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="calibrated: outlier columns reach the threshold in more than this fraction of tokens",
    )

    float_columns: int = Field(
        default=0,
        ge=0,
        description="calibrated: number of columns, those with the most outliers, whose weights stay in 16 bits",
    )
    outlier_dtype: Literal["float16", "bfloat16"] = Field(
        default="float16", description="with float_columns: dtype of their weights"
    )

    def without_effect(self) -> dict[str, str]:
        idle = {} if self.float_columns else {"outlier_dtype": "with float_columns: 0; leave it out"}
        return super().without_effect() | idle

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.float_columns and self.outliers == "runtime":
            raise ValueError("float_columns needs outliers: calibrated; at run time any column may have outliers")
        if self.activations == "none":
            raise ValueError("activations: none rounds no inputs, so outliers have no effect; use the pass rtn")
        if self.activation_scale != "token":
            kind = self.activation_scale
            reason = f"activation_scale: {kind} is not possible: LLM.int8 has one scale per token"
            raise ValueError(f"{reason}; use the pass rtn")
        if self.input_group is not None:
            reason = f"activations: {self.activations} has a scale per group, LLM.int8 one per token"
            raise ValueError(f"{reason}; use the pass rtn")
        if self.token_share and self.outliers == "runtime":
            raise ValueError("token_share needs outliers: calibrated; at run time one token is enough")

    @property
    def rounding_scheme(self) -> RoundingScheme | None:
        assert self.input_grid is not None
        calibrated = self.outliers == "calibrated"
        threshold, clip = None if calibrated else self.threshold, self.activation_clip
        return RoundingScheme(self.input_grid, "token", threshold, calibrated, clip=clip)

    @property
    def layer_observer(self) -> MakeObserver | None:
        return partial(OutlierFrequency, threshold=self.threshold) if self.outliers == "calibrated" else None

    def rounding(self, layer: Layer) -> InputRounding:
        assert self.input_grid is not None
        if self.outliers == "runtime":
            return InputRounding.of(self.input_grid, threshold=self.threshold, clip=self.activation_clip)
        if layer.inputs.tokens == 0:
            raise NumericError(f"{layer.name}: no calibration token reached this layer; use outliers: runtime")
        columns = layer.inputs.frequency > self.token_share
        columns[self.in_floats(layer)] = True
        layer.log("note", "input columns that are not rounded", columns=int(columns.sum()))
        return InputRounding.of(self.input_grid, columns=columns, clip=self.activation_clip)

    def effects(self, layer: LayerScheme) -> Effects:
        effects = super().effects(layer)
        if not self.float_columns:
            return effects
        outliers = OutliersScheme(self.float_columns, "column", self.outlier_dtype)
        return replace(effects, scheme=effects.scheme.with_parts(*effects.scheme.parts, outliers))

    def in_floats(self, layer: Layer) -> Int[Tensor, " n"]:
        """Return the columns whose weights stay in 16 bits, ascending; of equally many outliers the first columns."""
        if not self.float_columns:
            return torch.arange(0)
        often = layer.inputs.frequency.argsort(descending=True, stable=True)
        return often[: self.float_columns].sort().values

    def codes(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer) -> Codes | list[WeightPart]:
        if not self.float_columns:
            return self.nearest(weight, layer)
        columns = self.in_floats(layer)
        masked = weight if layer.mask is None else weight * layer.mask
        codes = self.nearest(masked.index_fill(1, columns, 0), layer)
        outliers = OutliersPart.of_columns(columns, masked[:, columns], weight.shape[1], self.outlier_dtype)
        return [CodesPart.of(codes), outliers]
