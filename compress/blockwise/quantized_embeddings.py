"""Quantize the embedding and the LM head to block types of the format, if no pass has compressed them."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from compress.checkpoint.formats.base import Ends
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.sources.files import pooling_in
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.models.kinds.contract import text_config
from compress.models.structure.ends import find_ends
from compress.numerics.quant.codes import quantize
from compress.passes.contract.context import Run
from compress.passes.contract.passes import Step


def embeddings_of(opened: OpenModel) -> Ends:
    """Return the names of the embedding and the LM head of a model, with its config and tokenizer."""
    embedding_name = head_name = None
    is_tied = False
    for end in find_ends(opened.model):
        embedding_name = f"{end.embedding}.weight" if end.embedding is not None else embedding_name
        head_name = f"{end.head}.weight" if end.head is not None else head_name
        is_tied = is_tied or end.role == "tied"
    name = opened.source.rstrip("/").rpartition("/")[2]
    pooling, config = pooling_in(opened.side_files), text_config(opened.config)
    class_name = type(opened.model).__name__
    return Ends(config, opened.tokenizer, name, embedding_name, head_name, is_tied, pooling, class_name)


def quantize_embeddings(opened: OpenModel, run: Run, steps: Sequence[Step]) -> None:
    """Quantize the embedding and the LM head in place as the format stores them, and store the codes in `run.ends`.

    A weight that has not changed since it was quantized keeps its codes. An embedding or LM head that a pass compresses
    is left out.
    """
    compressed = {name for _, _, names in steps for name in names}
    excluded = {f"{name}.weight" for end in find_ends(opened.model) if end.name in compressed for name in end.names}
    part_by_name = quantized_embeddings(opened, run, excluded)
    run.ends.clear()
    run.ends.update(part_by_name)
    for name, part in part_by_name.items():
        weight = opened.model.get_parameter(name)
        weight.data = part.dense(torch.float32).to(weight)


def quantized_embeddings(opened: OpenModel, run: Run, excluded: Set[str] = frozenset()) -> dict[str, CodesPart]:
    """Return the codes of the dense embedding and LM head by name of their weights, if the format quantizes them.

    Args:
        opened: the model.
        run: the run.
        excluded: weights to leave out.
    """
    ends, part_by_name = embeddings_of(opened), {}
    state = dict(opened.model.named_parameters())
    for name in ends.weights:
        scheme = (
            run.format.end_layout(ends, name, state[name].shape) if name in state and name not in excluded else None
        )
        if scheme is None:
            continue
        weight, previous = state[name], run.ends.get(name)
        is_unchanged = previous is not None and torch.equal(previous.dense(torch.float32).to(weight), weight)
        part_by_name[name] = (
            previous if previous is not None and is_unchanged else _rounded(weight, scheme, run.scale_dtype)
        )
    return part_by_name


def _rounded(weight: Tensor, scheme: CodesScheme, dtype: torch.dtype) -> CodesPart:
    """Quantize a weight to the nearest codes of a scheme, with scales of `dtype`."""
    search = "absmax" if scheme.grid.bits == 8 else "mse"  # 8 bits clip nothing
    weight = weight.detach().float()
    codes = quantize(weight, scheme.grid, scheme.group_size, scheme.symmetric, search, dtype=dtype)
    return CodesPart.of(codes).in_storage(dtype)
