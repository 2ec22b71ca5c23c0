"""Compare the source of a run, before any work, with the same source opened by transformers alone.

All later checks compare a model with itself. This one does not: a reader that ignores a tensor, or casts it, computes
other outputs than transformers.
"""

from __future__ import annotations

from math import prod

import torch

from compress.checkpoint.opened import OpenModel
from compress.errors import CannotRun, ModelError, one_line
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.numerics.dtypes import is_finite
from compress.passes.contract.journal import Journal
from compress.passes.contract.memory import available_bytes
from compress.pipeline.verify import ROUNDED_TOLERANCE, TOLERANCE, transformers_model

TOKENS = 16
SMALL_BYTES = 1 << 26
"""A model of this size is opened twice, also where the plan of the run needs less memory."""
MB = 1e6


def check_source(opened: OpenModel, batch: Batch, remote: bool, planned_bytes: int, journal: Journal) -> None:
    """Raise ModelError if the outputs of a model differ from those of transformers.

    A model that is quantized already, and one that takes more memory than the run, are not compared; a note says so.

    Args:
        batch: a few tokens.
        remote: whether the model's own code may run.
        planned_bytes: memory of the run.
    """
    checkpoint = opened.weights.checkpoint
    if checkpoint is None or checkpoint.caches:
        return  # in memory, or opened by transformers itself; or with a policy that only compress reads
    reason = _too_large(opened, planned_bytes)
    if checkpoint.format is not None:
        reason = f"it is in format {checkpoint.format.name}"
    if reason is None:
        try:
            theirs = transformers_model(type(opened.model), checkpoint.folder, opened.dtype, remote).to(opened.device)
        except CannotRun as error:
            reason = f"transformers cannot load it: {one_line(error.cause)}"
        else:
            _compare(opened, theirs, batch, journal)
    if reason is not None:
        journal.add("note", "model", f"its outputs were not compared with those of transformers: {reason}")


def _compare(opened: OpenModel, theirs: torch.nn.Module, batch: Batch, journal: Journal) -> None:
    with opened.streaming() as model:
        logits, expected = logits_of(model, batch), logits_of(theirs, batch)
    opened.map_ends()  # the comparison has read them
    if not is_finite(expected):
        return  # transformers computes no numbers either; the sweep names the layer
    largest = max(float(expected.abs().max()), 1.0)
    difference = float((logits - expected).abs().max())
    half = opened.dtype.itemsize < torch.float32.itemsize
    message = f"its outputs differ from those of transformers by up to {difference:.3g} in {opened.dtype}"
    if not difference <= (ROUNDED_TOLERANCE if half else TOLERANCE) * largest:
        raise ModelError(
            f"model: {opened.source} is read otherwise than transformers reads it: {message}; report it as a bug"
        )
    if difference > max(TOLERANCE, torch.finfo(opened.dtype).eps) * largest:
        journal.add("note", "model", f"{message}, as different orders of sums may")


def _too_large(opened: OpenModel, planned_bytes: int) -> str | None:
    """Why a second copy of the model does not fit into the memory of the run; None if it does."""
    shapes = [tensor.shape for tensor in opened.model.state_dict(keep_vars=True).values()]
    needed_bytes = sum(map(prod, shapes)) * opened.dtype.itemsize
    most = min(max(planned_bytes, SMALL_BYTES), available_bytes(opened.device) // 2)
    return f"it takes {needed_bytes / MB:.0f} MB, the run {planned_bytes / MB:.0f} MB" if needed_bytes > most else None
