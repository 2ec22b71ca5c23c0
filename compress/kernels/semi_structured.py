"""2:4 packed sparse weights in float16 or bfloat16 on a GPU, multiplied by its sparse tensor cores through torch.

NVIDIA's Ampere whitepaper (2020) describes the instructions; torch converts the weight to their layout.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import PartLike, RoundingLike
from compress.native.choice import chosen
from compress.native.compiling import constant_result

TYPES = (torch.float16, torch.bfloat16)
LEAST = 16  # divisor of rows and columns: `_DTYPE_SHAPE_CONSTRAINTS` of torch's class for cuSPARSELt
OLDEST = (8, 0)  # the compute capability of the first GPUs with such instructions


class SemiStructuredKernel:
    """2:4 sparse floats times floats of the same dtype.

    Attributes:
        device: device type of the calls that the kernel supports. Tests replace it.
    """

    device = "cuda"

    def supports(self, part: PartLike, x: Tensor, rounding: RoundingLike | None) -> bool:
        if x.device.type != self.device or rounding is not None or (x.requires_grad and torch.is_grad_enabled()):
            return False
        return suits(part, x.dtype) and x.numel() > 0 and available(x.device)

    def prepare(self, part: PartLike) -> Tensor:
        sparse_part: Any = part
        return torch.sparse.to_sparse_semi_structured(sparse_part.dense(sparse_part.dtype).contiguous())

    def product(
        self, x: Tensor, part: PartLike, prepared: Tensor, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        bias = bias if bias is None else bias.to(x.dtype)
        rows = x.reshape(-1, part.shape[1])
        return torch.nn.functional.linear(rows, prepared, bias).view(*x.shape[:-1], part.shape[0])


@constant_result
def available(device: torch.device) -> bool:
    """Whether torch has sparse products for the device, and kernels are not disabled."""
    return chosen() != "none" and (device.type != "cuda" or _capable(device))


@cache
def _capable(device: torch.device) -> bool:
    cuda = not torch.version.hip and torch.cuda.get_device_capability(device) >= OLDEST
    return cuda and torch.backends.cusparselt.is_available()


def suits(part: Any, dtype: torch.dtype) -> bool:
    """Whether a part contains 2:4 floats in a dtype and shape that torch accepts, for inputs of that dtype."""
    if part.kind != "sparse" or part.scheme.values.kind != "dense" or part.scheme.sparsity.n_of_m != (2, 4):
        return False
    return part.dtype == dtype and dtype in TYPES and all(size and size % LEAST == 0 for size in part.shape)


KERNEL = SemiStructuredKernel()
