"""The dense linear layers of torch and transformers, and which of their subclasses compute the same function."""

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
def is_linear(cls: type[nn.Module]) -> bool:
    """Return whether modules of a class compute x W + b.

    A subclass that overrides `forward` is compared with its base class on an example.
    """
    base = next((base for base in LINEARS if issubclass(cls, base)), None)
    if base is None or cls.forward is base.forward:
        return base is not None
    with torch.random.fork_rng(devices=[]):
        plain = base(3, 2)
    trial, x = cls.__new__(cls), torch.tensor([[1.0, -2.0, 4.0]] if base is nn.Linear else [[1.0, -2.0]])
    nn.Module.__init__(trial)
    vars(trial).update({name: value for name, value in vars(plain).items() if name not in vars(trial)})
    trial._parameters.update(plain._parameters)
    with torch.no_grad():
        try:
            output = call_foreign(trial, x)
        except CannotRun as error:
            log.debug("%s is not treated as a linear layer: %s", cls.__name__, error)
            return False
        return isinstance(output, Tensor) and torch.allclose(output, plain(x))
