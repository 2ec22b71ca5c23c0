"""A model whose inputs of linears are rotated, rounded and rotated back, so that its loss depends on the rotations.

With an orthogonal R, x W^T = (x R) (W R)^T. A model with rotated weights computes Q(x R) (W R)^T if it rounds the
inputs, which is (Q(x R) R^T) W^T: the weights and all activations between linears can stay as they are. If weights are
rounded too, they are rotated on both sides, and the output is rotated back: Q(x R) Q(B^T W R)^T B^T. The gradient of
the rounding is that of a straight-through estimator (SpinQuant, arXiv 2405.16406, section 4.2).
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

ATTACHED = "learned_rotations"
"""The name of the rotations as a part of the model, while they are learned."""


class Turn(Protocol):
    """An orthogonal map of channels."""

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """x R."""
        ...

    def back(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """x R^T."""
        ...


@dataclass(frozen=True, eq=False)
class OfAll:
    """A learned rotation of all channels."""

    rotation: Float[Tensor, "n n"]

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return x @ self.rotation

    def back(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return x @ self.rotation.T


@dataclass(frozen=True, eq=False)
class OfHeads:
    """One learned rotation for each of several runs of channels; other channels stay. channels: those of every run."""

    rotation: Float[Tensor, "size size"]
    channels: Int[Tensor, "heads size"]

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return self._turned(x, self.rotation)

    def back(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return self._turned(x, self.rotation.T)

    def _turned(self, x: Tensor, rotation: Tensor) -> Tensor:
        flat = self.channels.flatten()
        turned = (x[..., flat].unflatten(-1, self.channels.shape) @ rotation).flatten(-2)
        return x.index_copy(-1, flat, turned.to(x.dtype))


@dataclass(frozen=True, eq=False)
class WhenRun:
    """A fixed Hadamard transform, which the layer computes when it runs."""

    transform: Hadamard

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return self.transform.plain(x)

    def back(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return self.transform.absorbed(x)


@dataclass
class RotatedLinear:
    """What is rotated and rounded in a linear. inputs, outputs: the rotations of both sides, in order.

    rounding: of the rotated inputs; None: they are not rounded. weight: how the rotated weight is rounded; None: it is
    not.
    """

    inputs: list[Turn] = field(default_factory=list)
    outputs: list[Turn] = field(default_factory=list)
    rounding: InputRounding | None = None
    weight: Parametrization | None = None

    def rotated_inputs(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """Q(x R)."""
        for turn in self.inputs:
            x = turn.forward(x)
        return x if self.rounding is None else straight(x, self.rounding(x.detach()))

    def rounded_inputs(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """Q(x R) R^T."""
        found = self.rotated_inputs(x)
        for turn in reversed(self.inputs):
            found = turn.back(found)
        return found

    def rotated_weight(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Q(B^T W R)."""
        for turn in self.inputs:
            weight = turn.forward(weight)
        for turn in self.outputs:
            weight = turn.forward(weight.T).T
        return weight if self.weight is None else self.weight(weight)

    def product(self, x: Float[Tensor, "*batch in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "*batch out"]:
        """Q(x R) Q(B^T W R)^T B^T."""
        found = self.rotated_inputs(x) @ self.rotated_weight(weight).T
        for turn in reversed(self.outputs):
            found = turn.back(found)
        return found


@dataclass
class RotatedStudent(Student):
    """A model whose rotations are learned. where: the label for errors."""

    where: str = ""

    def split(self, device: torch.device, processes: int, reshard: bool) -> Student:
        """Raise RecipeError: FSDP would shard the rotations, of which a step needs all rows."""
        raise RecipeError(
            f"{self.where}: the launcher uses FSDP, which shards the rotations, but a step needs whole ones; "
            "launch with --multi_gpu, or leave learn out"
        )


@contextmanager
def rotated(
    model: nn.Module, rotations: Mapping[str, nn.Parameter], layers: Mapping[str, RotatedLinear], where: str = "learn"
) -> Iterator[Student]:
    """Run dense linears of the model, by full name, with rotated and rounded inputs inside of the context.

    rotations: the learned parameters, by names without dots; the layers use them. where: the label for errors.
    """
    last = _Last()
    modules = {name: model.get_submodule(name) for name in layers}
    for name, module in modules.items():
        module.forward = _forward(module, layers[name], last)
    model.add_module(ATTACHED, nn.ParameterDict(dict(rotations)))
    try:
        yield RotatedStudent(model, {"rotations": dict(rotations)}, where=where)
    finally:
        delattr(model, ATTACHED)
        for module in modules.values():
            del module.forward


@dataclass
class _Last:
    """The last rounded tensor: linears that read one tensor in the same way share the work."""

    how: Sequence[Any] = ()
    given: Tensor | None = None
    found: Tensor | None = None

    def rounded(self, x: Tensor, layer: RotatedLinear) -> Tensor:
        scheme = None if layer.rounding is None else layer.rounding.scheme
        how = (*layer.inputs, scheme, torch.is_grad_enabled())
        if x is not self.given or how != self.how or self.found is None:
            self.how, self.given, self.found = how, x, layer.rounded_inputs(x)
        return self.found


def _forward(module: nn.Module, layer: RotatedLinear, last: _Last) -> Any:
    plain = module.forward

    def with_rounded_inputs(x: Tensor) -> Tensor:
        return plain(last.rounded(x, layer))

    def with_rounded_weight(x: Tensor) -> Tensor:
        dense = CompressedLinear.of(module)
        found = layer.product(x, dense.weight)
        return found if dense.bias is None else found + dense.bias

    return with_rounded_inputs if layer.weight is None else with_rounded_weight
