"""Whether transformers may open the model a second time within the memory of a run."""

from __future__ import annotations

from math import prod

import torch

from compress.checkpoint.opened import OpenModel
from compress.models.experts import in_experts
from compress.passes.contract.memory import available_bytes
from compress.recipe.tables import megabytes

SMALL_BYTES = 1 << 26
"""A model of this size is opened twice, also where the plan of the run needs less memory."""


def too_large(opened: OpenModel, planned_bytes: int) -> str | None:
    """Return why a second copy of the model does not fit into the memory of the run; None if it does."""
    checkpoint = opened.weights.checkpoint
    shapes = [tensor.shape for tensor in opened.model.state_dict(keep_vars=True).values()]
    one_file = checkpoint is not None and checkpoint.format is not None and checkpoint.format.file is not None
    element_bytes = opened.dtype.itemsize + (torch.float32.itemsize if one_file else 0)  # dequantized, then cast
    stacks = 2 if any(in_experts(block.module) for block in opened.blocks) else 1  # the matrices, and their stacks
    needed_bytes = sum(map(prod, shapes)) * element_bytes * stacks
    most = min(max(planned_bytes, SMALL_BYTES), available_bytes(opened.device) // 2)
    return (
        f"it takes {megabytes(needed_bytes)} MB, the run {megabytes(planned_bytes)} MB" if needed_bytes > most else None
    )
