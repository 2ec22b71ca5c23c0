"""Failures of the machine during a phase of a run: memory that does not suffice, and a device that is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from compress.errors import DeviceError, Failure, ShortageError, one_line

NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""Parts of torch's messages for a failed allocation."""
LOST = ("CUDA error", "CUDA driver error", "cuBLAS error", "CUDNN_STATUS")
"""Parts of torch's messages for a device that does not compute any more."""


@contextmanager
def named_failures(phase: str, device: torch.device) -> Iterator[None]:
    """Raise ShortageError or DeviceError, with the phase and a remedy, for a failure of memory or of the device."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        failure = _named(error, phase, device)
        if failure is None:
            raise
        raise failure from error


def _named(error: RuntimeError | MemoryError, phase: str, device: torch.device) -> Failure | None:
    """Return the error that says what failed; None for another error."""
    text = str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(part in text for part in NO_MEMORY):
        return ShortageError(
            f"{phase}: a batch does not fit into the memory of {device}; use a smaller calibration.batch, or shorter "
            "sequences (calibration.length, in the evaluation eval.length); if the pass trains, also a smaller batch "
            "of the pass; compress plan says what needs how much, and a limit of memory (memory: SIZE) is kept"
        )
    if isinstance(error, torch.AcceleratorError) or any(part in text for part in LOST):
        return DeviceError(
            f"{phase}: the device {device} failed ({one_line(error)}); finished blocks are kept, and the same command "
            "resumes after them, if need be after a restart of the machine"
        )
    return None
