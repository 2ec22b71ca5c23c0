"""Round the weights of a module to the dtype in which they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from compress.layers.base import WeightPart
from compress.models.computation import kept_dtype
from compress.models.paged import paged
from compress.numerics.dtypes import rounded
from compress.passes.contract.context import Run


def round_to_storage(module: nn.Module, run: Run, within: Path | None = None) -> None:
    """Round dense float tensors to the storage dtype, in which scales are computed.

    Embeddings and LM heads that are already quantized are not changed.

    Args:
        within: folder of the files that hold rounded tensors; None: they are in memory.
    """
    parameters = {name: tensor for name, tensor in module.named_parameters() if name not in run.ends}

    def changed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in parameters.items():
            storage = kept_dtype(module, name, run.storage)
            data = tensor.data
            result = rounded(data, run.format.stored_dtype(tensor.shape, storage))
            if result is not data:
                yield name, result

    for name, tensor in paged(changed(), within):
        parameters[name].data = tensor
    for part in module.modules():
        if isinstance(part, WeightPart):
            part.round_to(run.storage)
