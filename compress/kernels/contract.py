"""The contract of kernels, and what they may use of the components of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor


class RoundingLike(Protocol):
    """The rounding of inputs (`weights.transforms.rounding`)."""

    def __call__(self, x: Tensor) -> Tensor:
        """The rounded inputs, dequantized, in the dtype of x."""
        ...


class Part(Protocol):
    """The interface of a part of a weight (`weights.base.WeightPart`) that kernels use."""

    kind: ClassVar[str]
    scheme: Any
    shape: tuple[int, int]
    narrow_inputs: bool

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        ...

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias in plain torch."""
        ...

    def prepared(self, kernel: Kernel) -> Any:
        """The cached result of `kernel.prepare`."""
        ...

    def is_prepared(self, kernel: Kernel) -> bool:
        """Whether the result of `kernel.prepare` is cached."""
        ...


class Transform(Protocol):
    """The interface of a transform of inputs (`weights.base.InputTransform`) that kernels use."""

    kind: ClassVar[str]
    scheme: Any

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        ...

    def plain(self, x: Tensor) -> Tensor:
        """The transformed inputs in plain torch."""
        ...


class TransformKernel(Protocol):
    """A faster way to compute some kinds of transforms of inputs."""

    def supports(self, transform: Transform, x: Tensor) -> bool:
        """Whether this kernel can compute this call (kind, device, dtype, sizes)."""
        ...

    def transformed(self, transform: Transform, x: Tensor) -> Tensor:
        """The transformed inputs, equal to `plain` up to float rounding."""
        ...


class Kernel(Protocol):
    """A faster way to compute x W^T + bias for some kinds of parts."""

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        """Whether this kernel can compute this call (kind, device, dtype, bits, group size, rounding)."""
        ...

    def prepare(self, part: Part) -> Any:
        """Convert the weights to the layout of the kernel; called once per part."""
        ...

    def product(
        self, x: Tensor, part: Part, prepared: Any, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        """rounding(x) W^T + bias, equal to the reference up to float rounding."""
        ...


class JointKernel(Kernel, Protocol):
    """A kernel that also computes several products with the same inputs in one call."""

    def products(
        self, x: Tensor, parts: Sequence[Part], rounding: RoundingLike | None, biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """`product` for each part; x is contiguous."""
        ...


class TracedKernel(Kernel, Protocol):
    """A kernel whose products torch.compile calls as an operator, by a number for the weight."""

    def handle(self, prepared: Any) -> int:
        """A number that stands for the result of `prepare` in this process, as long as it is in memory."""
        ...

    def mode(self, rounding: RoundingLike | None) -> tuple[int, int, float]:
        """Numbers that stand for a rounding by the inputs alone."""
        ...
