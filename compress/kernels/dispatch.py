"""Kernel dispatch: the first kernel that supports a call computes a part of a layer; otherwise plain torch does.

A kernel is a file of this folder that defines `KERNEL`, for products, or `TRANSFORM`, for transforms of inputs; it is
found by its file. A kernel of products receives the activation quantizer together with the weights, so that it can
compute with integers instead of dequantized values.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compress import kernels
from compress.kernels.contract import Kernel, PartLike, RoundingLike, Transform, TransformKernel

SHARED = ("contract", "dispatch", "recording", "reference")
"""Files of this folder that are not kernels. Kernels import only `contract` and `recording` of them."""


def find_kernels() -> tuple[list[Kernel], list[TransformKernel]]:
    """Import the kernels of products and of transforms of this folder, in the order of their file names."""
    modules = [
        importlib.import_module(f"{kernels.__name__}.{f.name}")
        for f in pkgutil.iter_modules(kernels.__path__)
        if f.name not in SHARED
    ]
    transforms = [module.TRANSFORM for module in modules if hasattr(module, "TRANSFORM")]
    return [module.KERNEL for module in modules if not hasattr(module, "TRANSFORM")], transforms


KERNELS: list[Kernel]
"""All kernels of products; the first that supports a call computes it."""
TRANSFORMS: list[TransformKernel]
"""All kernels of transforms of inputs."""
KERNELS, TRANSFORMS = find_kernels()


MAX_JOINT = 8
"""Largest number of layers that `linears` computes in one call."""


TORCH = "torch"
"""The name of plain torch among the kernels."""


def kernel_for(part: PartLike, x: Tensor, rounding: RoundingLike | None) -> Kernel | None:
    """Return the first kernel that supports a call; None if plain torch computes it."""
    for kernel in KERNELS:
        if kernel.supports(part, x, rounding):
            return kernel
    return None


def kernel_name(part: PartLike, x: Tensor, rounding: RoundingLike | None) -> str:
    """Return the file of this folder whose kernel computes a call, or `TORCH`."""
    kernel = kernel_for(part, x, rounding)
    return TORCH if kernel is None else type(kernel).__module__.removeprefix(f"{kernels.__name__}.").partition(".")[0]


def prepare(part: PartLike, x: Tensor, rounding: RoundingLike | None) -> None:
    """Convert the weights for the kernel of a call in advance, instead of in the first call."""
    kernel = kernel_for(part, x, rounding)
    if kernel is not None:
        part.prepared(kernel)


_plain: list[bool] = []  # per process, since greenlets of a sweep lose context variables


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute without kernels while the context is open.

    Kernels add in another order than torch. With activation quantization, a difference in the last bit can change a
    code.
    Therefore runs compress and verify in plain torch; checkpoints do not depend on kernels.
    """
    _plain.append(True)
    try:
        yield
    finally:
        _plain.pop()


def in_plain_torch() -> bool:
    """Whether a `plain_torch` context is open."""
    return bool(_plain)


def linear(x: Tensor, parts: Iterable[PartLike], rounding: RoundingLike | None, bias: Tensor | None) -> Tensor:
    """Compute the sum of part.product(rounding(x)) over parts, plus bias.

    The first kernel that supports a part computes it.
    """
    total: Tensor | None = None
    rounded: Tensor | None = None
    for part in parts:
        kernel = None if _plain else kernel_for(part, x, rounding)
        if kernel is not None:
            y = kernel.product(x, part, part.prepared(kernel), rounding, bias)
        else:
            rounded = (x if rounding is None else rounding(x)) if rounded is None else rounded
            y = part.product(rounded, bias)
        total, bias = y if total is None else total + y, None  # the first part adds the bias
    assert total is not None, "a layer has at least one part"
    return total


def transformed(transform: Transform, x: Tensor) -> Tensor:
    """Transform the inputs by the first kernel that supports the call; otherwise in plain torch."""
    for kernel in () if _plain else TRANSFORMS:
        if kernel.supports(transform, x):
            return kernel.transformed(transform, x)
    return transform.plain(x)


def linears(
    x: Tensor, parts: Sequence[PartLike], rounding: RoundingLike | None, biases: Sequence[Tensor | None]
) -> list[Tensor] | None:
    """Compute `linear` for several layers of one part each in one call.

    Args:
        x: inputs of all layers.
        parts: at most `MAX_JOINT` parts.
        rounding: activation quantizer of all layers, or None.
        biases: bias of each layer, or None.

    Returns:
        The outputs; None if no kernel computes them together.
    """
    if _plain or not x.is_contiguous():
        return None
    kernel: Any = kernel_for(parts[0], x, rounding)
    if not hasattr(kernel, "products") or not all(kernel.supports(part, x, rounding) for part in parts[1:]):
        return None
    return kernel.products(x, parts, rounding, biases)


def traced(part: PartLike, x: Tensor, rounding: Any) -> tuple[int, int, int, int, float] | None:
    """Return the arguments of `traced_linear` for a call that a kernel computes; None for other calls."""
    kernel: Any = kernel_for(part, x, rounding)
    if not hasattr(kernel, "handle") or (rounding is not None and not rounding.computes_like(rounding)):
        return None
    return kernel.handle(part.prepared(kernel)), part.shape[0], *kernel.mode(rounding)


def traced_linear(x: Tensor, bias: Tensor | None, handle: int, rows: int, *mode: Any) -> Tensor:
    """Compute the product for torch.compile, as an operator with few arguments to check."""
    return torch.ops.compress.packed_linear(x, bias, handle, rows, *mode)
