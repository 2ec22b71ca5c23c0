"""Round the embedding and the head to block types of the format, if no pass has compressed them."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from compress.checkpoint.formats.base import Ends
from compress.checkpoint.sources.opening import OpenModel
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.models.kinds.objective import text_config
from compress.models.structure.ends import find_ends
from compress.numerics.quant.codes import quantize
from compress.passes.contract.context import Run
from compress.passes.contract.passes import Step


def ends_of(opened: OpenModel) -> Ends:
    """The parts of a model that are outside of its layers."""
    embedding = head = None
    tied = False
    for end in find_ends(opened.model):
        embedding = f"{end.embedding}.weight" if end.embedding is not None else embedding
        head = f"{end.head}.weight" if end.head is not None else head
        tied = tied or end.role == "tied"
    name = opened.source.rstrip("/").rpartition("/")[2]
    return Ends(text_config(opened.config), opened.tokenizer, name, embedding, head, tied)


def round_ends(opened: OpenModel, run: Run, steps: Sequence[Step]) -> None:
    """Round the embedding and the head to the form in which the format stores them, in place; keep that form.

    A weight that has not changed since it was rounded keeps its form. An end that a pass compresses is left out.
    """
    compressed = {name for _, _, names in steps for name in names}
    left = {f"{name}.weight" for end in find_ends(opened.model) if end.name in compressed for name in end.names}
    found = rounded_ends(opened, run, left)
    run.ends.clear()
    run.ends.update(found)
    for name, part in found.items():
        weight = opened.model.get_parameter(name)
        weight.data = part.dense(torch.float32).to(weight)


def rounded_ends(opened: OpenModel, run: Run, left: Set[str] = frozenset()) -> dict[str, CodesPart]:
    """The stored forms of the dense embedding and head by the names of their weights, if the format rounds them.

    left: weights to leave out.
    """
    ends, found = ends_of(opened), {}
    state = dict(opened.model.named_parameters())
    for name in ends.weights:
        scheme = run.format.end_layout(ends, name, state[name].shape) if name in state and name not in left else None
        if scheme is None:
            continue
        weight, known = state[name], run.ends.get(name)
        same = known is not None and torch.equal(known.dense(torch.float32).to(weight), weight)
        found[name] = known if known is not None and same else _rounded(weight, scheme, run.scale_dtype)
    return found


def _rounded(weight: Tensor, scheme: CodesScheme, dtype: torch.dtype) -> CodesPart:
    """The nearest codes of a scheme for a weight. dtype: of scales."""
    search = "absmax" if scheme.grid.bits == 8 else "mse"  # 8 bits clip nothing
    weight = weight.detach().float()
    codes = quantize(weight, scheme.grid, scheme.group_size, scheme.symmetric, search, dtype=dtype)
    return CodesPart.of(codes).in_storage(dtype)
