"""Division by a number, with the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def divided(values: Tensor, number: float) -> Tensor:
    """Return values / number, each quotient rounded once, so that scales and codes do not depend on the device.

    torch multiplies a tensor on a GPU by the rounded reciprocal of a Python number, which is often one unit in the last
    place off. It divides by a tensor on the GPU. Half precision is divided in float32, as torch does on a CPU.
    """
    if values.device.type == "cpu":
        return values / number
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.to(wide) / torch.full((), number, dtype=wide, device=values.device)).to(values.dtype)
