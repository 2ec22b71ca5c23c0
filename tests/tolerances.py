"""How far apart sums of floats may be that are equal on paper.

Kernels of another processor, other threads and weights that are mapped at another address add in another order. So
weights, codes and masks are compared bit for bit, logits and other sums by these; a wrong scale, zero point or order of
columns is far above them.
"""

import torch

LOGITS = 1e-4  # of the tiny models, whose largest logits are about 10, in float32
UNITS = 32  # units in the last place of the largest number, for a few layers one after the other


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The same dtype and shape, and the same numbers but for the order of sums."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    found, wanted = found.detach(), wanted.detach()
    largest = max(float(wanted.abs().max()), 1.0)
    return float((found.float() - wanted.float()).abs().max()) <= UNITS * torch.finfo(wanted.dtype).eps * largest
