"""Rotate, quantize and rotate back the inputs of a model's linears, so that its loss depends on the rotations.

With an orthogonal R, x W^T = (x R) (W R)^T. A model with rotated weights and activation quantization computes
Q(x R) (W R)^T, which is (Q(x R) R^T) W^T: the weights and all activations between linears are unchanged. If weights are
quantized too, they are rotated on both sides, and the output is rotated back: Q(x R) Q(B^T W R)^T B^T. The gradient of
the quantizer is that of a straight-through estimator (SpinQuant, arXiv 2405.16406, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compress.errors import RecipeError
from compress.layers.linear import CompressedLinear
from compress.layers.transforms.hadamard import Hadamard
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.fake import straight
from compress.train.parametrization import Parametrization
from compress.train.student import Student

ROTATIONS_NAME = "learned_rotations"
"""The name of the rotations as a submodule of the model in training."""


class ChannelRotation(Protocol):
    """An orthogonal map of channels."""

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """Compute x R."""
        ...

    def apply_transposed(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """Compute x R^T."""
        ...


@dataclass(frozen=True, eq=False)
class FullRotation:
    """A learned rotation of all channels.

    Attributes:
        rotation: the orthogonal matrix.
    """

    rotation: Float[Tensor, "n n"]

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return x @ self.rotation

    def apply_transposed(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return x @ self.rotation.T


@dataclass(frozen=True, eq=False)
class HeadRotation:
    """One learned rotation for each of several runs of channels, such as heads; other channels are unchanged.

    Attributes:
        rotation: the orthogonal matrix.
        channels: channels of every run.
    """

    rotation: Float[Tensor, "size size"]
    channels: Int[Tensor, "heads size"]

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return self._turned(x, self.rotation)

    def apply_transposed(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return self._turned(x, self.rotation.T)

    def _turned(self, x: Tensor, rotation: Tensor) -> Tensor:
        flat = self.channels.flatten()
        turned = (x[..., flat].unflatten(-1, self.channels.shape) @ rotation).flatten(-2)
        return x.index_copy(-1, flat, turned.to(x.dtype))


@dataclass(frozen=True, eq=False)
class OnlineHadamard:
    """A fixed Hadamard transform that the layer computes online.

    Attributes:
        transform: the transform.
    """

    transform: Hadamard

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return self.transform.plain(x)

    def apply_transposed(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return self.transform.absorbed(x)


@dataclass
class RotatedLinear:
    """The rotations and quantizers of a linear.

    Attributes:
        inputs: rotations of the inputs, in order.
        outputs: rotations of the outputs, in order.
        rounding: quantizer of the rotated inputs, or None.
        weight: quantizer of the rotated weight, or None.
    """

    inputs: list[ChannelRotation] = field(default_factory=list)
    outputs: list[ChannelRotation] = field(default_factory=list)
    rounding: InputRounding | None = None
    weight: Parametrization | None = None

    def rotated_inputs(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """Compute Q(x R)."""
        for rotation in self.inputs:
            x = rotation.forward(x)
        return x if self.rounding is None else straight(x, self.rounding(x.detach()))

    def quantized_inputs(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """Compute Q(x R) R^T."""
        quantized = self.rotated_inputs(x)
        for rotation in reversed(self.inputs):
            quantized = rotation.apply_transposed(quantized)
        return quantized

    def rotated_weight(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Compute Q(B^T W R)."""
        for rotation in self.inputs:
            weight = rotation.forward(weight)
        for rotation in self.outputs:
            weight = rotation.forward(weight.T).T
        return weight if self.weight is None else self.weight(weight)

    def product(self, x: Float[Tensor, "*batch in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "*batch out"]:
        """Compute Q(x R) Q(B^T W R)^T B^T."""
        output = self.rotated_inputs(x) @ self.rotated_weight(weight).T
        for rotation in reversed(self.outputs):
            output = rotation.apply_transposed(output)
        return output


@dataclass
class RotatedStudent(Student):
    """A model whose rotations are learned.

    Attributes:
        label: prefix of error messages.
    """

    label: str = ""

    def split(self, device: torch.device, processes: int, reshard: bool) -> Student:
        """Raise RecipeError: FSDP would shard the rotations, but a step needs all of their rows."""
        raise RecipeError(
            f"{self.label}: the launcher uses FSDP, which shards the rotations, but a step needs whole ones; "
            "launch with --multi_gpu, or leave learn out"
        )


@contextmanager
def rotated(
    model: nn.Module, rotations: Mapping[str, nn.Parameter], layers: Mapping[str, RotatedLinear], label: str = "learn"
) -> Iterator[Student]:
    """Run dense linears of the model with rotated and quantized inputs inside the context.

    Args:
        model: the model.
        rotations: learned parameters, by names without dots; the layers use them.
        layers: rotations and quantizers by full name of the linear.
        label: prefix of error messages.
    """
    shared_inputs = _SharedInputs()
    modules = {name: model.get_submodule(name) for name in layers}
    for name, module in modules.items():
        module.forward = _forward(module, layers[name], shared_inputs)
    model.add_module(ROTATIONS_NAME, nn.ParameterDict(dict(rotations)))
    try:
        yield RotatedStudent(model, {"rotations": dict(rotations)}, label=label)
    finally:
        delattr(model, ROTATIONS_NAME)
        for module in modules.values():
            del module.forward


@dataclass
class _SharedInputs:
    """The last quantized tensor; linears that quantize the same tensor in the same way share it."""

    key: Sequence[Any] = ()
    input: Tensor | None = None
    output: Tensor | None = None

    def quantized(self, x: Tensor, layer: RotatedLinear) -> Tensor:
        scheme = None if layer.rounding is None else layer.rounding.scheme
        key = (*layer.inputs, scheme, torch.is_grad_enabled())
        if x is not self.input or key != self.key or self.output is None:
            self.key, self.input, self.output = key, x, layer.quantized_inputs(x)
        return self.output


def _forward(module: nn.Module, layer: RotatedLinear, shared_inputs: _SharedInputs) -> Any:
    original_forward = module.forward

    def with_quantized_inputs(x: Tensor) -> Tensor:
        return original_forward(shared_inputs.quantized(x, layer))

    def with_quantized_weight(x: Tensor) -> Tensor:
        dense = CompressedLinear.of(module)
        output = layer.product(x, dense.weight)
        return output if dense.bias is None else output + dense.bias

    return with_quantized_inputs if layer.weight is None else with_quantized_weight
