"""Count a run from the configuration of its model: bytes, memory and work, with one block of each kind."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from compress.checkpoint.kinds_of_blocks import open_kinds_of_blocks
from compress.checkpoint.opening import open_for_plan
from compress.checkpoint.sources.gguf_parts import gguf_of
from compress.errors import ModelError
from compress.layers.linear import linears
from compress.passes.contract.passes import ModelPass
from compress.pipeline.checks import check_all
from compress.pipeline.dequantized import kept_codes
from compress.pipeline.footprint import Footprint
from compress.pipeline.formats import further_formats
from compress.pipeline.model_facts import ModelFacts, facts_of
from compress.pipeline.plan import block_bytes, footprint_of, plan_on
from compress.pipeline.resolve import ResolvedRecipe, resolve_and_check
from compress.pipeline.sizes import within_size
from compress.pipeline.workload import BlockWork, block_works
from compress.recipe.schema import Recipe

NUMBERED = re.compile(r"(?<![A-Za-z_\d])\d")
"""A number in a pattern that is not part of a name such as fc1: the number of a block."""


@dataclass(frozen=True)
class Counted:
    """A recipe whose run is counted.

    footprint: its memory, on the device of the run. counts: how many blocks of the model each of its blocks stands for.
    dense_bytes, checkpoint_bytes: of all tensors, the latter in all formats. blocks: the work of each block; None: it
    is unknown, for the reason. notes: of the model and of the checks of the recipe.
    """

    footprint: Footprint
    counts: tuple[int, ...]
    dense_bytes: int
    checkpoint_bytes: int
    blocks: tuple[BlockWork, ...] | None
    reason: str
    notes: tuple[str, ...]

    @property
    def resolved(self) -> ResolvedRecipe:
        """The recipe, resolved on a model with the blocks of `counts`."""
        return self.footprint.resolved


def counted(recipe: Recipe, device: torch.device) -> Counted:
    """Count the run of a recipe on a device, which need not be there. No weights are read.

    Raises:
        CompressError: as `compress.pipeline.plan.plan`.
    """
    options = recipe.trust_remote_code, recipe.masks, kept_codes(recipe)
    if counts_by_kind(recipe):
        opened, counts = open_kinds_of_blocks(recipe.model, recipe.dtype, recipe.trust_remote_code, device)
    else:
        opened = open_for_plan(recipe.model, recipe.dtype, *options)
        counts = (1,) * len(opened.blocks)
    resolved = within_size(resolve_and_check(recipe, opened))
    facts = facts_of(resolved)
    planned, notes = plan_on(resolved, facts), check_all(resolved, facts)
    formats = {other.format.name: (other, layers) for other, layers in further_formats(resolved, facts)}
    checkpoint = planned.checkpoint_bytes + _repeated_bytes(resolved, facts, counts)[0]
    for other, layers in formats.values():
        checkpoint += plan_on(other, layers).checkpoint_bytes + _repeated_bytes(other, layers, counts)[0]
    dense = planned.dense_bytes + _repeated_bytes(resolved, facts, counts)[1]
    placed = replace(resolved, opened=replace(opened, device=device))
    placed = replace(placed, form=placed.opened if resolved.form is opened else resolved.form)
    unbuilt = sum((count - 1) * len(linears(b.module)) for b, count in zip(opened.blocks, counts, strict=True))
    footprint, reason, blocks = replace(footprint_of(placed), unbuilt_linears=unbuilt), "", None
    try:
        blocks = tuple(block_works(opened, counts, footprint.length, footprint.recipe.calibration.experts == "all"))
    except ModelError as error:
        reason = str(error)
    return Counted(footprint, counts, dense, checkpoint, blocks, reason, (*resolved.form.notes, *notes))


def counts_by_kind(recipe: Recipe) -> bool:
    """Return whether blocks of equal shapes are treated equally: by passes over blocks, without their numbers."""
    if gguf_of(recipe.model) is not None:
        return False
    surveys = [survey for step in recipe.passes if (survey := step.survey()) is not None]
    if any(isinstance(step, ModelPass) for step in recipe.passes) or any(survey.whole for survey in surveys):
        return False
    return not any(NUMBERED.search(pattern) for step in recipe.passes for pattern in _patterns(step.model_dump()))


def _patterns(options: dict[str, object]) -> list[str]:
    """Return the patterns of modules among the options of a pass."""
    patterns = [*_texts(options.get("targets")), *_texts(options.get("ignore"))]
    overrides = options.get("overrides")
    for override in overrides if isinstance(overrides, (list, tuple)) else ():
        patterns += _texts(override.get("targets")) if isinstance(override, dict) else []
    return patterns


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, (list, tuple)) else []


def _repeated_bytes(resolved: ResolvedRecipe, facts: ModelFacts, counts: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes (stored, dense) of the blocks that are not there because equal ones stand for them."""
    stored = dense = 0
    for block, count in zip(resolved.form.blocks, counts, strict=False):
        if count > 1:
            sizes = block_bytes(resolved, facts, block)
            stored, dense = stored + (count - 1) * sizes[0], dense + (count - 1) * sizes[1]
    return stored, dense
