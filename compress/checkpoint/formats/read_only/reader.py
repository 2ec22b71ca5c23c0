"""ReadOnly: the contract of formats that compress reads, and does not write."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from compress.checkpoint.formats.base import Format
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.scheme import LayerScheme


class ReadOnly(Format):
    """A format of another program. The tensors of a layer tell whether it is quantized."""

    def refuses(self, scheme: LayerScheme) -> str | None:
        return f"format {self.name} is read and not written; use another format"

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        raise AssertionError(f"format {self.name} is not written")

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        raise AssertionError(f"format {self.name} is not written")

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        raise AssertionError(f"format {self.name} is not written")

    @abstractmethod
    def readable(self, scheme: LayerScheme) -> Collection[str]:
        """Return the names inside the module of all tensors that `decode` reads, or leaves out with a note."""


def scalar(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor with one number as [1]. Raises ValueError for another shape."""
    if tensor.numel() != 1:
        raise ValueError(f"{name} is {list(tensor.shape)}, but it must be one number")
    return tensor.reshape(1)


def input_scale(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the static scale of inputs as [1]. Raises KeyError if it is missing, ValueError for another one."""
    specs = {name: TensorSpec((1,))}
    scale = checked(specs, {name: scalar(name, tensors[name])}, "")[name]
    if not bool((scale > 0).all() and scale.isfinite().all()):
        raise ValueError(f"{name} is {float(scale)}, but it must be positive and finite")
    return scale
