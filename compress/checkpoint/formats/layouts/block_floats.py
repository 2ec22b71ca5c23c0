"""The common base of the layouts of compressed-tensors for block floats: NVFP4, MXFP4 and MXFP8.

The reader (transformers 5.23 with compressed-tensors 0.20) dequantizes weights in bfloat16 for every dtype of the
model: it computes one product in float32 and rounds it once. A model that is loaded in another dtype therefore computes
with weights that are rounded to bfloat16. Servers compute from the codes and do not round them.

Inputs are rounded to the same grid while the model runs. Those of NVFP4 have a global scale from calibration:

    <m>.input_global_scale   float32 [1]   a divisor: 448 * 6 / the largest magnitude
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from compress.checkpoint.formats.layouts.layout import Layout, codes_of
from compress.layers.base import TensorSpec
from compress.layers.scheme import LayerScheme


class BlockFloats(Layout):
    """A layout of floats with a coded scale per group of columns. strategy, scale_dtype: as in the config."""

    strategy: ClassVar[str]
    scale_dtype: ClassVar[str]

    def refuses(self, scheme: LayerScheme) -> str | None:
        codes, width, rounding = codes_of(scheme), scheme.shape[1], scheme.rounding
        name, size = codes.grid.name, codes.grid.group_size
        assert size is not None
        if rounding is not None and rounding.grid is not codes.grid:
            return f"{name} weights are read only with activations none or {name}; use one of these, or format: native"
        if rounding is not None and codes.grid.scaling.fused and rounding.scale != "local":
            return (
                f"inputs {name} with a global scale per token have no reader; use activation_scale: static, or format: "
                "native"
            )
        if codes.indexed:
            return f"act_order: group has no reader for {name}; use act_order: static, or format: native"
        if width % size:
            return (
                f"{name} has groups of {size} columns, which do not divide the {width} inputs; "
                "use another grid for this layer, or format: native"
            )
        return None

    def scales(self, scheme: LayerScheme) -> TensorSpec:
        """The stored scales of the weight."""
        (rows, width), size = scheme.shape, codes_of(scheme).grid.group_size
        assert size is not None
        return TensorSpec((rows, width // size), getattr(torch, self.scale_dtype.removeprefix("torch.")))

    def weight_arguments(self, scheme: LayerScheme) -> dict[str, Any]:
        return super().weight_arguments(scheme) | {"strategy": self.strategy, "scale_dtype": self.scale_dtype}
