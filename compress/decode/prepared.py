"""Weights in the layouts of their kernels, before a step is recorded or compiled."""

from __future__ import annotations

from transformers import PreTrainedModel

from compress.kernels import dispatch
from compress.layers.linear import CompressedLinear


def prepare(model: PreTrainedModel) -> None:
    """Convert weights to the layouts of their kernels now; neither a recorder nor the compiler sees the conversion."""
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    for layer in model.modules():
        if isinstance(layer, CompressedLinear):
            x = like.new_zeros(1, layer.shape[1])
            for part in layer.all_parts:
                dispatch.prepare(part, x, layer.rounding)
            if layer.joint_call is not None:
                layer.traced = dispatch.traced(layer.all_parts[0], x, layer.rounding)
