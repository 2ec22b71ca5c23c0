"""FPTQ: for each input a static scale, logarithmic equalization before it, or a scale per token (Li 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import replace_linear
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.models.structure.links import Group
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.facts import Effects, Fact, Log, Preparation
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.observers import InputAbsMax
from compress.passes.families.equalizing import SMALLEST, EqualizingPass, Readers


class FPTQ(EqualizingPass):
    """Choose the activation quantization of each layer by its range; a pass that quantizes weights alone follows.

    The range v of an input is its largest magnitude in calibration.

    - v up to `equalize_above`: one static scale.
    - v between the bounds: each channel is divided by s_j = max|X_j| / log2(2 + max|X_j|), and the weights are
      multiplied by it (logarithmic activation equalization). Then one static scale.
    - v from `dynamic_from` on: a scale per token, computed at run time, and no equalization.

    The division is folded into the module that writes the input: a norm, or a linked linear. Each fold is verified in
    float32, and undone if it changes the block's output. An input between the bounds that cannot be equalized gets a
    scale per token.

    The layers keep this activation quantization. So the later pass that quantizes the weights is calibrated with it,
    and a pass that would replace it is an error.
    """

    use_for: ClassVar[str] = (
        "Static activation scales wherever the range allows them, for programs that are slow with scales per token."
    )
    not_for: ClassVar[str] = "The least loss: the recipes w4a8 and w8a8, with scales per token, lose less."
    paper: ClassVar[str] = "https://arxiv.org/abs/2308.15987"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "activations_quantized", "cache_quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"activations_quantized"})

    activations: Literal["int8", "fp8_e4m3"] = Field(
        default="int8", description="grid of the activations (inputs of linears), rounded at run time"
    )
    equalize_above: float = Field(
        default=15.0, ge=0, description="largest range of an input that gets a static scale as it is"
    )
    dynamic_from: float = Field(
        default=150.0,
        ge=0,
        description="range from which an input gets a scale per token; 0: all inputs; between the bounds it is "
        "equalized, and gets a static scale",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if 0 < self.dynamic_from < self.equalize_above:
            raise ValueError(
                f"dynamic_from {self.dynamic_from:g} is below equalize_above {self.equalize_above:g}; write bounds in "
                "ascending order"
            )

    def effects(self, layer: LayerScheme) -> Effects:
        effects, grid = super().effects(layer), GRIDS[self.activations]
        # not all formats store static scales with all weights, so these are the transforms to check
        rounding = RoundingScheme(grid, "static" if self.dynamic_from > 0 else "token")
        return replace(
            effects,
            scheme=layer.with_transform(RoundingScheme(grid)),
            transforms=(*effects.transforms, rounding),
            prepares=Preparation("quantized", self._mismatch, "rounds inputs"),
        )

    def _mismatch(self, later: Effects) -> str | None:
        if later.scheme.rounding is None:
            return None
        return "the later pass rounds the inputs in another way; leave its option activations out"

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        statistics = inputs.observe(self.statistics)
        ranges = {group: float(observer.absmax.max()) for group, observer in statistics.items()}
        self.equalize(block, inputs, statistics, log)
        for group, observer in statistics.items():
            self._round(block, inputs, group, observer, ranges[group], log)

    def scale(self, readers: Readers) -> Float[Tensor, " in"] | None:
        input_range = float(readers.absmax.max())
        if not self.equalize_above < input_range < self.dynamic_from:
            return None
        return readers.equalize(logarithmic(readers.absmax))

    def _round(
        self,
        block: nn.Module,
        inputs: BlockInputs,
        group: Group,
        statistics: InputAbsMax,
        range_before: float,
        log: Log,
    ) -> None:
        """Set the rounding of the inputs of a group.

        Args:
            statistics: after, range_before: the range before equalization.
        """
        grid, names = GRIDS[self.activations], [name for name in group.linears if name in inputs.names]
        range_now = float(statistics.absmax.max())
        static = self.is_static(statistics.tokens, range_before, equalized=range_now < range_before)
        for name in names:
            rounding = InputRounding.covering(grid, statistics.absmax.max(), inputs.storage) if static else None
            replace_linear(block, name).round_inputs(rounding or InputRounding.of(grid))
        kind = "one static scale" if static else "a scale per token"
        log("note", f"{', '.join(names)}: inputs with {kind}", range=range_before, equalized=range_now)

    def is_static(self, tokens: int, range_before: float, equalized: bool) -> bool:
        """Return whether an input gets a static scale.

        Args:
            range_before: its range before it was equalized, if it was.
        """
        if tokens == 0 or range_before >= self.dynamic_from:
            return False
        return equalized or range_before <= self.equalize_above


def logarithmic(inputs: Float[Tensor, " in"]) -> Float[Tensor, " in"]:
    """s_j = max|X_j| / log2(2 + max|X_j|) (section 3, activation equalization); 1 for channels that were always zero.

    Args:
        inputs: max|X_j|.
    """
    scale = inputs / torch.log2(2 + inputs)
    return torch.where(inputs > 0, scale.clamp(min=SMALLEST), torch.ones_like(scale))
