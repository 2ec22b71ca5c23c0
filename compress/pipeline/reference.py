"""Compare the source of a run, before any work, with the same source opened by transformers alone.

All later checks compare a model with itself. This one does not: a reader that ignores a tensor, misreads codes, or
casts a weight computes other outputs than transformers. Both models compute in float32, whatever the run computes in:
in 16 bits two right models differ by more than their roundings where a router is undecided between two experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.checkpoint.opened import OpenModel
from compress.errors import CannotRun, ModelError, one_line
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import CompressedLinear
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.passes.contract.journal import Journal
from compress.pipeline.model_facts import ModelFacts
from compress.pipeline.readers import OWN, unreadable
from compress.pipeline.resolve import ResolvedRecipe
from compress.pipeline.second_copy import too_large
from compress.pipeline.sources import open_start
from compress.pipeline.verify import ROUNDED_TOLERANCE, TOLERANCE, runnable, transformers_model
from compress.recipe.schema import Recipe

TOKENS = 16


def note_on_reference(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Return a note if the source is quantized and transformers cannot open it, so that a run has no reference."""
    reason = _without_reference(resolved.opened, resolved.recipe)
    return () if reason is None else (f"model: its outputs are not compared with those of transformers: {reason}",)


def check_source(opened: OpenModel, batch: Batch, recipe: Recipe, planned_bytes: int, journal: Journal) -> None:
    """Raise ModelError if the outputs of a model differ from those of transformers.

    A model that takes more memory than the run, and one that transformers does not load, are not compared; a note says
    so, here or in the plan (`note_on_reference`).

    Args:
        batch: a few tokens.
        planned_bytes: memory of the run; of a run in N processes, an N-th of it.
    """
    if opened.weights.checkpoint is None or _without_reference(opened, recipe) is not None:
        return  # in memory, or opened by transformers itself; or a note of the plan says why
    if opened.dtype != torch.float32:
        opened = open_start(recipe.model_copy(update={"dtype": "float32"}), opened.device)
    checkpoint = opened.weights.checkpoint
    assert checkpoint is not None
    reason = too_large(opened, planned_bytes)
    if reason is None:
        try:
            theirs = transformers_model(
                type(opened.model), checkpoint.folder, opened.dtype, recipe.trust_remote_code, checkpoint.format
            )
        except CannotRun as error:
            reason = f"transformers cannot load it: {one_line(error.cause)}"
        else:
            _compare(opened, runnable(theirs, opened.dtype, opened.device, journal), batch, journal)
    if reason is not None:
        journal.add("note", "model", f"its outputs were not compared with those of transformers: {reason}")


def _without_reference(opened: OpenModel, recipe: Recipe) -> str | None:
    """Return why transformers does not open a quantized source, or makes another model of it; None if it can."""
    checkpoint = opened.weights.checkpoint
    if checkpoint is None:
        return None
    if checkpoint.caches:
        return "transformers does not read its cache policy"
    format_ = checkpoint.format
    if format_ is None:
        return None
    if recipe.save.verify == "own":
        return "the recipe says verify: own"
    reason = format_.unverified or format_.misread(opened.config)
    return reason or unreadable(format_, opened.model, checkpoint.schemes, opened.dtype, False)


@plain_torch()
def _compare(opened: OpenModel, theirs: nn.Module, batch: Batch, journal: Journal) -> None:
    with opened.streaming() as model:
        logits, expected = logits_of(model, batch), logits_of(theirs, batch)
    quantized = opened.weights.has_layers
    dtypes, effect = _dequantization(opened, batch, logits) if quantized else ({opened.dtype}, 0.0)
    opened.map_ends()  # the comparison has read them
    if not bool(expected.isfinite().all()):
        return  # transformers computes no numbers either; the sweep names the layer
    largest = max(float(expected.abs().max()), 1.0)
    difference = float((logits - expected).abs().max())
    narrow = dtypes != {opened.dtype}
    message = f"its outputs differ from those of transformers by up to {difference:.3g} in {opened.dtype}"
    if not difference <= (ROUNDED_TOLERANCE if narrow else TOLERANCE) * largest + 2 * effect:
        checkpoint = opened.weights.checkpoint
        instead = "" if checkpoint is None or checkpoint.format is None else f"; {OWN}"
        raise ModelError(
            f"model: {opened.source} is read otherwise than transformers reads it: {message}; report it as a "
            f"bug{instead}"
        )
    if difference > TOLERANCE * largest:
        journal.add("note", "model", f"{message}, as different orders of sums, or of roundings, may")


def _dequantization(opened: OpenModel, batch: Batch, logits: Tensor) -> tuple[set[torch.dtype], float]:
    """Run the model once without activation quantization.

    Returns:
        The dtypes in which transformers dequantizes the layers, and the largest change of the logits.
    """
    checkpoint, dtypes = opened.weights.checkpoint, {opened.dtype}
    assert checkpoint is not None

    def visit(module: nn.Module, _: object) -> None:
        for layer in module.modules():
            if not isinstance(layer, CompressedLinear):
                continue
            layer.round_inputs(None)
            if checkpoint.format is not None and layer.quantized:
                dtypes.add(checkpoint.format.reads_in(layer.scheme, opened.dtype, layer.all_parts[0].dtype))

    with opened.streaming() as model:  # its hooks bring a block before it is visited, and renew its layers
        handles = [block.module.register_forward_pre_hook(visit) for block in opened.blocks]
        try:
            effect = float((logits_of(model, batch) - logits).abs().max())
        finally:
            for handle in handles:
                handle.remove()
    return dtypes, effect
