"""Fit a run into a limit of memory, or say before it begins what needs how much, and what would make it fit."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from compress.data.ids import extent
from compress.errors import ShortageError
from compress.models.experts import in_experts
from compress.models.paged import portion_bytes
from compress.passes.contract.memory import STORE_BYTES, copies_limit
from compress.passes.contract.passes import LayerPass, ModelPass, Step
from compress.pipeline.footprint import EVALUATION, Footprint, Need
from compress.pipeline.readers import OWN, not_asked, unverified
from compress.pipeline.resolve import ResolvedRecipe
from compress.recipe.tables import megabytes

LIBRARIES_BYTES = (
    600 * 10**6
)  # torch, transformers and what they import, a piece of text, and freed memory that the allocator keeps
SMALLEST_STORE = 1 << 24
MMAP_THRESHOLD = -3  # glibc, malloc.h: M_MMAP_THRESHOLD
SEPARATE_BYTES = 1 << 20


@dataclass(frozen=True)
class Fit:
    """What a run does to stay within a limit of memory, and what it needs then.

    batch: sequences of a calibration batch. store_bytes: the limit of each store of activations; more goes to files.
    copies_bytes: the limit of the copies that kernels make of packed weights. inputs_at_once: the most input tensors of
    a block whose statistics are in memory at once; None: those of all layers. recomputes: activations inside of a block
    are computed again for each input, instead of stored. pages_weights: weights of a block that are no views of its
    file, and solved ones, are in files. notes: what differs from the recipe.
    """

    batch: int
    store_bytes: int
    copies_bytes: int
    needs: tuple[Need, ...]
    inputs_at_once: int | None = None
    recomputes: bool = False
    pages_weights: bool = False
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The largest need."""
        return max(need.size_bytes for need in self.needs)


def unlimited(footprint: Footprint) -> Fit:
    """A run without a limit."""
    batch = footprint.recipe.calibration.batch
    copies = footprint.copies_bytes if footprint.copied_bytes > footprint.copies_bytes else sys.maxsize
    changed = footprint.inputs_at_once, footprint.recomputes, footprint.pages_weights
    return Fit(batch, footprint.store_bytes, copies, tuple(footprint.needs()), *changed)


def fitted(footprint: Footprint, memory_bytes: int) -> Fit:
    """Return the largest activation stores, groups of inputs and calibration batches with which the run fits a limit.

    memory_bytes: of the whole process, `LIBRARIES_BYTES` for libraries included. Smaller stores and groups change no
    sum. A smaller batch adds the same sums in another order, so it changes last, and is the recipe's from then on.
    Raises ShortageError, which says what would make it fit.
    """
    limit = memory_bytes - LIBRARIES_BYTES
    footprint = replace(footprint, copies_bytes=copies_limit(max(0, limit)))
    recipe_batch = footprint.recipe.calibration.batch
    for batch in _batches(footprint):
        resized = with_calibration(footprint, batch=batch)
        fit = _largest_fit(resized, limit)
        if fit is not None:
            return replace(fit, notes=tuple(_notes(fit, resized, recipe_batch, memory_bytes)))
    least = _least(with_calibration(footprint, batch=_batches(footprint)[-1]))
    free_bytes = max(0, limit)
    raise ShortageError(
        f"memory: {_what(least)}; {megabytes(free_bytes)} MB are left of {megabytes(memory_bytes)} MB after "
        f"{megabytes(LIBRARIES_BYTES)} MB for libraries; {_remedies(least, limit)}"
    )


def check_available(footprint: Footprint, available_bytes: int) -> Fit:
    """Return the run as its recipe asks; its stores and groups of inputs are smaller where the machine's memory is.

    Raises ShortageError as `fitted` does where the memory is too small all the same.
    """
    footprint = replace(footprint, copies_bytes=copies_limit(available_bytes))
    fit = _largest_fit(footprint, available_bytes)
    if fit is not None:
        return replace(fit, notes=tuple(_notes(fit, footprint, footprint.recipe.calibration.batch, available_bytes)))
    least = _least(footprint)
    raise ShortageError(
        f"memory: {_what(least)}; {megabytes(available_bytes)} MB are available to this process; "
        f"{_remedies(least, available_bytes)}"
    )


def with_calibration(footprint: Footprint, **changes: int) -> Footprint:
    """Return the footprint of the recipe with other options of its calibration."""
    return replace(footprint, resolved=footprint.resolved.with_calibration(**changes))


def separate_large_tensors() -> None:
    """Ask glibc to give back the memory of every freed tensor, from `SEPARATE_BYTES` on; elsewhere do nothing.

    By default it keeps up to as much again of what was freed, because it learns to serve large blocks from its heap.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(MMAP_THRESHOLD, SEPARATE_BYTES)


def verification_bytes(resolved: ResolvedRecipe, dense_bytes: int, checkpoint_bytes: int) -> int:
    """Return the memory in which transformers reads the checkpoint back; 0 if it is not asked to."""
    is_asked = not_asked(resolved.recipe, resolved.form.config) is None
    return dense_bytes + checkpoint_bytes if is_asked else 0


def check_verification(resolved: ResolvedRecipe, dense_bytes: int, checkpoint_bytes: int, limit_bytes: int) -> None:
    """Raise ShortageError if transformers, which reads the checkpoint back whole, needs more than the user's limit."""
    if shortage := _shortage(resolved, dense_bytes, checkpoint_bytes, limit_bytes):
        raise ShortageError(f"memory: {shortage}; {OWN}")


def verification_notes(
    resolved: ResolvedRecipe, dense_bytes: int, checkpoint_bytes: int, available_bytes: int
) -> tuple[str, ...]:
    """Return a note if transformers needs more to read the checkpoint back than this machine has available."""
    shortage = _shortage(resolved, dense_bytes, checkpoint_bytes, available_bytes)
    return () if shortage is None else (unverified(shortage),)


def _shortage(resolved: ResolvedRecipe, dense_bytes: int, checkpoint_bytes: int, limit_bytes: int) -> str | None:
    needed, free_bytes = verification_bytes(resolved, dense_bytes, checkpoint_bytes), max(0, limit_bytes)
    if not needed or needed <= limit_bytes:
        return None
    return (
        f"verification by transformers needs {megabytes(needed)} MB (dense model {megabytes(dense_bytes)} MB, "
        f"checkpoint {megabytes(checkpoint_bytes)} MB), {megabytes(free_bytes)} MB are left"
    )


def _batches(footprint: Footprint) -> list[int]:
    """Return the batch of the recipe, and halves of it down to one; passes that learn in steps of one batch keep it."""
    batch = footprint.recipe.calibration.batch
    sizes = [batch]
    if not any(step.requires.batches for _, step, _ in footprint.steps):
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
    return sizes


def _stores(footprint: Footprint) -> list[int]:
    """Return limits of a store: that of the footprint, then halves of what the activations take, then none."""
    limits, size = [footprint.store_bytes], min(footprint.store_bytes, footprint.states_bytes) // 2
    while size > SMALLEST_STORE:
        limits.append(size)
        size //= 2
    return [*limits, 0]


def _copies(footprint: Footprint) -> list[int]:
    """Return limits of the copies of packed weights: that of the footprint, then none that outlives its layer."""
    holds_all = 0 < footprint.copied_bytes <= footprint.copies_bytes
    return [footprint.copies_bytes, 0] if holds_all else [footprint.copies_bytes]


def _groups(footprint: Footprint) -> list[int | None]:
    """Return numbers of inputs whose statistics are in memory at once: the footprint's, then halves down to one."""
    counts: list[int | None] = [footprint.inputs_at_once]
    count = max(footprint.inputs_of_steps().values(), default=1)
    while count > 1:
        count = -(-count // 2)
        counts.append(count)
    return counts


def _least(footprint: Footprint) -> Footprint:
    """Return the footprint with the smallest stores, groups and copies, that holds nothing that can be recomputed.

    Weights are in files if they can be.
    """
    changed: dict[str, Any] = {"store_bytes": _stores(footprint)[-1], "inputs_at_once": _groups(footprint)[-1]}
    changed |= {"pages_weights": footprint.can_page, "copies_bytes": 0}
    return replace(footprint, **changed, recomputes=bool(footprint.recomputing_steps()))


def _largest_fit(footprint: Footprint, limit: int) -> Fit | None:
    """Return the run with the largest group of inputs, then the largest stores, within a limit; None if none fits.

    A smaller store costs only files, so stores shrink first, then weights go to files, then kernels copy packed weights
    again in each forward pass of the evaluation. Recomputing costs about one more forward pass through each block, a
    smaller group one or more for each group.
    """
    # statistics that are all in memory are freed as layers are compressed, so all of them may need less than some
    if not _fits(_least(footprint), limit) and not _fits(footprint, limit):
        return None
    can_recompute = (False, True) if footprint.recomputing_steps() else (False,)
    can_page = (False, True) if footprint.can_page else (False,)
    settings = product(_groups(footprint), can_recompute, _copies(footprint), can_page, _stores(footprint))
    for count, recomputes, copies, pages, store in settings:
        changed = {"inputs_at_once": count, "recomputes": recomputes, "pages_weights": pages, "copies_bytes": copies}
        fit = unlimited(replace(footprint, store_bytes=store, **changed))
        if fit.peak_bytes <= limit:
            return fit
    return None


def _notes(fit: Fit, footprint: Footprint, recipe_batch: int, memory_bytes: int) -> Iterator[str]:
    """Yield what is done to stay within the limit."""
    limit = f"to stay within {megabytes(memory_bytes)} MB"
    if fit.store_bytes < min(STORE_BYTES, footprint.states_bytes):
        in_files = megabytes(footprint.states_bytes - fit.store_bytes)
        yield (
            f"{limit}, activations between blocks beyond {megabytes(fit.store_bytes)} MB are stored in files, up to "
            f"{in_files} MB for each store"
        )
    if fit.pages_weights:
        yield (
            f"{limit}, weights of a block are stored in files, {megabytes(portion_bytes(0))} MB of them in memory; "
            "the codes do not change"
        )
    if fit.recomputes:
        has_experts = any(in_experts(block.module) for block in footprint.opened.blocks)
        stored = "; inputs of experts are stored once" if has_experts else ""
        for label, inputs in footprint.recomputing_steps().items():
            yield (
                f"{limit}, {label} computes the activations inside of a block again for each of its {inputs} inputs "
                f"instead of holding those of all batches{stored}; the codes do not change"
            )
    if fit.inputs_at_once is not None:
        for label, inputs in footprint.inputs_of_steps().items():
            if inputs > fit.inputs_at_once:
                count, groups = fit.inputs_at_once, -(-inputs // fit.inputs_at_once)
                yield (
                    f"{limit}, {label} keeps statistics of {count} of {inputs} inputs of a block at a time, in "
                    f"{groups} groups, each with its own forward passes; the codes do not change"
                )
    if footprint.copied_bytes > fit.copies_bytes:
        yield f"{limit}, kernels copy the weights of a layer again in each of its forward passes of the evaluation"
    if fit.batch < recipe_batch:
        yield (
            f"{limit}, calibration.batch is {fit.batch} instead of {recipe_batch}: the same sums are added in another "
            "order, so some codes may differ; recipe.yaml of the checkpoint states it"
        )


def _what(footprint: Footprint) -> str:
    """The largest need in words."""
    most = max(footprint.needs(), key=lambda need: need.size_bytes)
    return f"{most.where} needs {megabytes(most.size_bytes)} MB of tensors ({most.text})"


def _remedies(footprint: Footprint, limit: int) -> str:
    """Return what makes the run fit: each change alone, as far as one is enough; otherwise the memory that it needs."""
    remedies = [*_shorter(footprint, limit), *_other_passes(footprint, limit)]
    needed_bytes = footprint.peak_bytes() + LIBRARIES_BYTES
    return f"it fits with {', or '.join([*remedies, f'{megabytes(needed_bytes)} MB of memory'])}"


def _shorter(footprint: Footprint, limit: int) -> Iterator[str]:
    """Yield smaller values of the calibration and of the evaluation."""
    calibration = footprint.recipe.calibration
    sequences, length = extent(calibration, "calibration", calibration.sequences, calibration.length)
    for name, value in (("batch", calibration.batch), ("sequences", sequences), ("length", length)):
        tried = value // 2
        while tried >= (1 if name != "length" else 16):
            if _fits(with_calibration(footprint, **{name: tried}), limit):
                yield f"calibration.{name}: {tried}"
                break
            tried //= 2
    most = max(footprint.needs(), key=lambda need: need.size_bytes)
    sizes = [need.size_bytes for need in footprint.needs() if need.where != EVALUATION]
    if most.where == EVALUATION and max(sizes) <= limit:
        yield "a smaller eval.length, or eval: null"


def _other_passes(footprint: Footprint, limit: int) -> Iterator[str]:
    """Other options of the passes, or other passes."""
    steps = footprint.steps
    turned: list[Step] = [
        (label, step.model_copy(update={"true_sequential": False}) if isinstance(step, LayerPass) else step, names)
        for label, step, names in steps
    ]
    waiting = [label for label, step, _ in steps if isinstance(step, LayerPass) and step.true_sequential]
    if waiting and _fits(_with_steps(footprint, turned), limit):
        yield f"true_sequential: false of {' and '.join(waiting)}"
    by_blocks = [step for step in steps if not isinstance(step[1], ModelPass)]
    labels = [label for label, step, _ in steps if isinstance(step, ModelPass)]
    if labels and _fits(_with_steps(footprint, by_blocks), limit):
        yield f"passes that work block by block in the place of {' and '.join(labels)}"


def _with_steps(footprint: Footprint, steps: Sequence[Step]) -> Footprint:
    """Return the footprint of a recipe with other passes."""
    return replace(footprint, resolved=replace(footprint.resolved, steps=tuple(steps)))


def _fits(footprint: Footprint, limit: int) -> bool:
    return footprint.peak_bytes() <= limit
