"""Contract of kernels, and the interfaces of parts and transforms that kernels use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor


class RoundingLike(Protocol):
    """Activation quantizer (`layers.transforms.rounding`)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the quantized and dequantized inputs, in the dtype of x."""
        ...


class PartLike(Protocol):
    """Interface of a part of a weight (`layers.base.WeightPart`) that kernels use."""

    kind: ClassVar[str]
    scheme: Any
    shape: tuple[int, int]
    narrow_inputs: bool

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        ...

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x W^T + bias in plain torch."""
        ...

    def prepared(self, kernel: Kernel) -> Any:
        """Return the cached result of `kernel.prepare`."""
        ...

    def is_prepared(self, kernel: Kernel) -> bool:
        """Whether the result of `kernel.prepare` is cached."""
        ...


class Transform(Protocol):
    """Interface of a transform of inputs (`layers.base.InputTransform`) that kernels use."""

    kind: ClassVar[str]
    scheme: Any

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        ...

    def plain(self, x: Tensor) -> Tensor:
        """Transform the inputs in plain torch."""
        ...


class TransformKernel(Protocol):
    """Fast implementation of some kinds of input transforms."""

    def supports(self, transform: Transform, x: Tensor) -> bool:
        """Whether this kernel can compute this call (kind, device, dtype, sizes)."""
        ...

    def transformed(self, transform: Transform, x: Tensor) -> Tensor:
        """Transform the inputs; the result equals `plain` up to float rounding."""
        ...


class Kernel(Protocol):
    """Fast implementation of x W^T + bias for some kinds of parts."""

    def supports(self, part: PartLike, x: Tensor, rounding: RoundingLike | None) -> bool:
        """Whether this kernel can compute this call (kind, device, dtype, bits, group size, rounding)."""
        ...

    def prepare(self, part: PartLike) -> Any:
        """Convert the weights to the layout of the kernel; called once per part."""
        ...

    def product(
        self, x: Tensor, part: PartLike, prepared: Any, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        """Compute rounding(x) W^T + bias, equal to the reference up to float rounding."""
        ...


class JointKernel(Kernel, Protocol):
    """Kernel that also computes several products with the same inputs in one call."""

    def products(
        self, x: Tensor, parts: Sequence[PartLike], rounding: RoundingLike | None, biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Compute `product` for each part; x is contiguous."""
        ...


class TracedKernel(Kernel, Protocol):
    """Kernel whose products torch.compile calls as an operator, with a number for the weight."""

    def handle(self, prepared: Any) -> int:
        """Return a number that identifies the result of `prepare` in this process while it is in memory."""
        ...

    def mode(self, rounding: RoundingLike | None) -> tuple[int, int, float]:
        """Encode a dynamic activation quantizer as (mode, bits, clip)."""
        ...
