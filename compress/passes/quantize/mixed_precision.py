"""Mixed precision: the inputs with the largest rounding error stay in 16 bits (Bondarenko 2021)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from compress.errors import NumericError
from compress.layers.linear import CompressedLinear
from compress.numerics.metrics import relative_error
from compress.passes.contract.facts import Fact, Log
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.passes import BlockPass
from compress.passes.contract.samples import Rows

# Measured on SmolLM2-135M, W8A8 by rtn, WikiText-2 (none rounded: 28.88): all layers rounded 29.66; inputs of 20 of
# 210 layers unrounded (below 25 dB) 29.59; of 58 layers (below 29.5 dB) 29.24.
THRESHOLD = 29.5


class MixedPrecision(BlockPass):
    """Turn activation quantization off in the most sensitive layers; use it after a pass that quantizes activations.

    The error of a layer is the signal-to-noise ratio of its output, 20 log10(||W x|| / ||W (q(x) - x)||) in dB, on
    calibration inputs of the compressed model. The weights keep their codes.

    The paper ranks all activations of the model, which needs the whole model at once. Here each block is decided alone:
    layers below `threshold` get inputs in floating point, or with `fraction` the worst layers of the block. The journal
    contains every layer's ratio, which helps to choose a threshold. Servers that compute layers with the same input as
    one (q, k, v) need `by: input`.
    """

    use_for: ClassVar[str] = (
        "W8A8 that loses too much: the layers that activation quantization harms most get inputs in 16 bits."
    )
    not_for: ClassVar[str] = "Weight-only quantization (W4A16): the pass changes inputs only."
    paper: ClassVar[str] = "https://arxiv.org/abs/2109.12948"
    after: ClassVar[frozenset[Fact]] = frozenset({"activations_quantized"})

    threshold: float | None = Field(
        default=None,
        description=f"signal-to-noise ratio in dB below which inputs stay unrounded; default {THRESHOLD:g}",
    )
    fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="instead of threshold: fraction of each block's layers with unrounded inputs, worst first",
    )
    by: Literal["layer", "input"] = Field(
        default="layer",
        description="what is decided at once: a layer, or all layers that read the same input, by the worst of them",
    )

    def model_post_init(self, context: Any) -> None:
        if self.threshold is not None and self.fraction is not None:
            raise ValueError("threshold and fraction exclude each other; leave one of them out")

    def memory(self, size: ProblemSize) -> int:
        return super().memory(size) + Rows.block_bytes(size)

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        layers, ratios, together = {}, {}, {}
        for group, statistics in inputs.observe(Rows).items():
            for name in group.linears:
                layer = block.get_submodule(name)
                if name in inputs.names and isinstance(layer, CompressedLinear) and layer.rounding is not None:
                    layers[name], ratios[name] = layer, signal_to_noise(layer, statistics.rows, name)
                    together.setdefault(name if self.by == "layer" else group.linears[0], []).append(name)
        for leader in self.worst({leader: min(ratios[name] for name in names) for leader, names in together.items()}):
            for name in together[leader]:
                layers[name].round_inputs(None)
        for name, ratio in ratios.items():
            is_unrounded = layers[name].rounding is None
            message = f"{name}: inputs stay in 16 bits" if is_unrounded else f"{name}: inputs are rounded"
            log("note", message, signal_to_noise_db=round(ratio, 2))

    def worst(self, ratios: dict[str, float]) -> list[str]:
        """Return the layers with unrounded inputs.

        Args:
            ratios: signal-to-noise ratio in dB by layer, or by the first of a set.
        """
        if self.fraction is not None:
            ranked = sorted(ratios, key=lambda name: ratios[name])
            return ranked[: math.ceil(self.fraction * len(ranked))]
        limit = THRESHOLD if self.threshold is None else self.threshold
        return [name for name, ratio in ratios.items() if ratio < limit]


def signal_to_noise(layer: CompressedLinear, rows: Tensor | None, name: str) -> float:
    """20 log10 of ||W x|| / ||W (q(x) - x)||, in dB; infinity if rounding changes nothing.

    Raises:
        NumericError: when no calibration token reached the layer.
    """
    if rows is None:
        raise NumericError(
            f"{name}: no calibration token reached this layer, so its signal-to-noise ratio is unknown; use more "
            "calibration text, or name the layer in ignore"
        )
    assert layer.rounding is not None
    weight = layer.weight_as(rows.dtype)
    error = relative_error(layer.rounding(rows) @ weight.T, rows @ weight.T)
    return -20 * math.log10(error) if error > 0 else math.inf
