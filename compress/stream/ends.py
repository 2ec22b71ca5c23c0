"""The weights outside of the blocks: embedding and head in the form that the format stores, and all others."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.api.context import Run
from compress.formats.base import Ends
from compress.model.objective import text_config
from compress.model.open.opening import OpenModel
from compress.model.save import in_storage, outside_state
from compress.numerics.quant.codes import quantize
from compress.weights.codes import CodesPart, CodesScheme
from compress.weights.layer import LayerScheme


def ends_of(opened: OpenModel) -> Ends:
    """The parts of a model that are outside of its layers."""
    model = opened.model
    names = {id(tensor): name for name, tensor in model.named_parameters()}  # a tied weight has its first name
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, head = (names.get(id(getattr(module, "weight", None))) for module in modules)
    name = opened.source.rstrip("/").rpartition("/")[2]
    return Ends(text_config(opened.config), opened.tokenizer, name, embedding, None if head == embedding else head)


def round_ends(opened: OpenModel, run: Run) -> None:
    """Round the embedding and the head to the form in which the format stores them, in place; keep that form.

    A weight that has not changed since it was rounded keeps its form.
    """
    ends, state = ends_of(opened), dict(opened.model.named_parameters())
    for name in (ends.embedding, ends.head):
        scheme = None if name is None else run.format.end_layout(ends, name, state[name].shape)
        if name is None or scheme is None:
            continue
        weight, known = state[name], run.ends.get(name)
        if known is not None and torch.equal(known.dense(torch.float32).to(weight), weight):
            continue
        run.ends[name] = part = _rounded(weight, scheme, run)
        weight.data = part.dense(torch.float32).to(weight)


def _rounded(weight: Tensor, scheme: CodesScheme, run: Run) -> CodesPart:
    """The nearest codes of a scheme for a weight."""
    search = "absmax" if scheme.grid.bits == 8 else "mse"  # 8 bits clip nothing
    weight = weight.detach().float()
    codes = quantize(weight, scheme.grid, scheme.group_size, scheme.symmetric, search, dtype=run.storage)
    return CodesPart.of(codes).in_storage(run.storage)


def outside_tensors(opened: OpenModel, run: Run) -> dict[str, Tensor]:
    """Tensors outside of all blocks, in their stored form."""
    found: dict[str, Tensor] = {}
    ends = ends_of(opened)
    for name, tensor in outside_state(opened).items():
        part, layout = run.ends.get(name), run.format.end_layout(ends, name, tensor.shape)
        if part is None and layout is not None:
            part = _rounded(tensor, layout, run)
        if part is None:
            found[name] = in_storage(tensor, run.format.stored_dtype(tensor.shape, run.storage))
        else:
            scheme = LayerScheme(part.shape, (part.scheme,))
            encoded = run.format.encode(scheme, [part], [])
            found |= {f"{name.removesuffix('weight')}{key}": each for key, each in encoded.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in found.items()}
