"""The dense linears of torch and transformers, and which of their subclasses compute the same."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.errors import CannotRun, call_foreign

LINEARS = (nn.Linear, Conv1D)
"""The dense layers that compute x W + b; Conv1D stores W transposed, as [in, out]."""

log = logging.getLogger(__name__)


@cache
def is_linear(kind: type[nn.Module]) -> bool:
    """Whether modules of a class compute x W + b; a subclass with a forward pass of its own is tried on an example."""
    base = next((base for base in LINEARS if issubclass(kind, base)), None)
    if base is None or kind.forward is base.forward:
        return base is not None
    with torch.random.fork_rng(devices=[]):
        plain = base(3, 2)
    trial, x = kind.__new__(kind), torch.tensor([[1.0, -2.0, 4.0]] if base is nn.Linear else [[1.0, -2.0]])
    nn.Module.__init__(trial)
    vars(trial).update({name: value for name, value in vars(plain).items() if name not in vars(trial)})
    trial._parameters.update(plain._parameters)
    with torch.no_grad():
        try:
            found = call_foreign(trial, x)
        except CannotRun as error:
            log.debug("%s is not treated as a linear layer: %s", kind.__name__, error)
            return False
        return isinstance(found, Tensor) and torch.allclose(found, plain(x))
