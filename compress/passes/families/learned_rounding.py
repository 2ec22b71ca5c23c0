"""Passes that learn the rounding of a block's weights by gradients, from a start by GPTQ or by rounding to nearest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import Self

from compress.layers.linear import CompressedLinear
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.linalg import Regularization
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import Grid
from compress.numerics.quant.rounding import round_columns
from compress.numerics.quant.weighted_search import importance_of
from compress.passes.contract.facts import Log, Requirements
from compress.passes.contract.layers import BlockInputs, Layer
from compress.passes.contract.observers import Gram
from compress.passes.contract.passes import BlockPass
from compress.passes.families.quantizing import Quantizing, ScaleOption
from compress.passes.families.reconstruction import ErrorName


@dataclass(frozen=True)
class RoundingStart:
    """The start of a learned rounding.

    Attributes:
        wanted: [out, in], the weight whose nearest values are the codes.
        mask: True where weights are kept.
    """

    wanted: Float[Tensor, "out in"]
    codes: Codes
    mask: Bool[Tensor, "out in"] | None


class BlockQuantizing(Quantizing, BlockPass):
    """A block pass that quantizes the linears of a block together, so that the block's output stays what it should be.

    Inputs are rounded if this is asked for, with a scale per token.
    """

    error: ErrorName = Field(
        default="asymmetric",
        description="target of the block's output: 'asymmetric': of the uncompressed model, which runs too; "
        "'symmetric': of the original block on the same inputs",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.activation_scale != "token":
            raise ValueError(f"activation_scale: {self.activation_scale} is not supported by this pass; use token")

    @property
    def requires(self) -> Requirements:
        return Requirements(data=True, reference=self.error == "asymmetric", batches=True)

    def target(self, block: nn.Module, inputs: BlockInputs, batch: int) -> Tensor:
        """Return the wanted output of the block, which is not yet rounded."""
        return inputs.reference(batch) if self.error == "asymmetric" else inputs.forward(block, batch)

    def options_of(self, inputs: BlockInputs, name: str) -> Self:
        """Return the pass with the options of a layer of the block."""
        return self.for_layer(inputs.layer(name).name) or self

    def roundings(self, inputs: BlockInputs) -> dict[str, InputRounding | None]:
        """Return the rounding of the inputs of every layer, or None."""
        return {name: self.options_of(inputs, name).rounding(inputs.layer(name)) for name in inputs.names}


class LearnedRoundingPass(BlockQuantizing):
    """A block pass that learns rounding, with rounded inputs if they are asked for."""

    start: Literal["gptq", "rtn"] = Field(default="gptq", description="start of the learned rounding")
    scale: ScaleOption = Field(
        default="importance",
        description="as for rtn; 'importance', for start: gptq: the least error as the sweep weighs it; other "
        "defaults: 'mse' for start: rtn and group_size: tensor, 'absmean' for ternary and binary",
    )

    @classmethod
    def of_grid(cls, grid: Grid, options: Mapping[str, Any]) -> dict[str, Any]:
        """Also the scale search of the start."""
        return ({"scale": "mse"} if options.get("start") == "rtn" else {}) | super().of_grid(grid, options)

    @property
    def compensates(self) -> type[Gram] | None:
        return Gram if self.start == "gptq" else None

    @property
    def weighs_columns(self) -> bool:
        return self.start == "gptq"

    def starts(self, block: nn.Module, inputs: BlockInputs, log: Log) -> dict[str, RoundingStart]:
        """Round every layer of the pass as a start."""
        statistics = inputs.observe(Gram)
        starts: dict[str, RoundingStart] = {}
        for group in inputs.groups:
            gram_of_group = statistics.pop(group)  # its cached factor ends with it
            names = [name for name in group.linears if name in inputs.names]
            weights = {name: CompressedLinear.of(block.get_submodule(name)).weight.float() for name in names}
            shared_absmax = max(float(weight.abs().max()) for weight in weights.values())
            for name, weight in weights.items():
                gram = gram_of_group if self.start == "gptq" and gram_of_group.tokens else None
                if self.start == "gptq" and gram is None:
                    log(
                        "fallback",
                        f"{name}: no calibration token reached this layer; it starts from rounding to nearest",
                    )
                starts[name] = self.options_of(inputs, name).begin(weight, gram, inputs.layer(name), shared_absmax)
        return starts

    def begin(
        self, weight: Float[Tensor, "out in"], statistics: Gram | None, layer: Layer, shared_absmax: float | None = None
    ) -> RoundingStart:
        """Round a weight as a start: to nearest, or by GPTQ with static order if `statistics` is given."""
        layer, mask = replace(layer, shared_absmax=shared_absmax), layer.mask
        if statistics is None:
            return RoundingStart(weight, self.nearest(weight, layer), mask)
        order = statistics.diagonal.argsort(descending=True, stable=True)
        factor = statistics.factor_of(layer.name, layer.log, Regularization(), order)
        importance = importance_of(factor, order) if self.scale == "importance" else None
        options = replace(self.grid_options(layer), importance=importance)
        rounded = round_columns(weight, factor, options, mask, order, record_targets=True)
        return RoundingStart(rounded.targets, rounded.codes, mask)
