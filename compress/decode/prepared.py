"""Pack weights into the layouts of their kernels before a step is traced or compiled."""

from __future__ import annotations

from transformers import PreTrainedModel

from compress.kernels import dispatch
from compress.layers.linear import CompressedLinear


def prepare(model: PreTrainedModel) -> None:
    """Convert weights to the layouts of their kernels.

    Neither tracing nor torch.compile then includes the conversion.
    """
    example = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    for layer in model.modules():
        if isinstance(layer, CompressedLinear):
            x = example.new_zeros(1, layer.shape[1])
            for part in layer.all_parts:
                dispatch.prepare(part, x, layer.rounding)
            if layer.joint_call is not None:
                layer.traced = dispatch.traced(layer.all_parts[0], x, layer.rounding)
