"""The format `dense`: dequantized weights in the storage dtype, which any program reads.

    <m>.weight   [out, in] (or [in, out] if the model's own layer stores it transposed)

It holds weights of every grid. It saves no bytes; it serves comparisons and pruned models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from compress.checkpoint.formats.base import Format
from compress.layers.base import InputTransform, TensorSpec, WeightPart
from compress.layers.scheme import LayerScheme


class Dense(Format):
    """The `dense` format."""

    name = "dense"
    negative_scales = True
    served = True

    def refuses(self, scheme: LayerScheme) -> str | None:
        if scheme.rounding is not None:
            return "format dense cannot state that activations are rounded; use format: compressed-tensors"
        return None

    def adapt(self, scheme: LayerScheme) -> LayerScheme | None:
        return None

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        raise AssertionError("layers are dequantized before they reach this format")

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        raise AssertionError("layers are dequantized before they reach this format")

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        raise AssertionError("this format holds no codes")

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        return None

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        return {}
