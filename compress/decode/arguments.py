"""The arguments of decoding steps, made from those of the step before.

transformers makes the positions and the mask of each step anew, as slowly as several layers of a small model compute.
It makes those of two steps of each text, and of two behind a sliding window. Where the second follows from the first,
so do the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel

from compress.decode.caches import DecodingCache
from compress.models.kinds.objective import text_config

IDS, MASK, POSITIONS, CACHE = "input_ids", "attention_mask", "position_ids", "past_key_values"
CHANGING = {MASK, POSITIONS, CACHE}
GROWING = {"full_attention", "sliding_attention"}
"""Kinds of attention in which a token sees itself and what the token before it saw, but the oldest of a full window."""


@dataclass(frozen=True)
class Made:
    """The arguments of a step but its cache.

    given: what they were made from, but what changes in each step. edits: of the cache. seen: tokens of the text, with
    the new one. steady: they are what follows from the step before.
    """

    arguments: dict[str, Any]
    given: dict[str, Any]
    cache: weakref.ref[Cache]
    edits: int
    seen: int
    steady: bool


class StepArguments:
    """Makes the arguments of the model for one more token per sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        kind: Any = type(model)
        standard: Any = GenerationMixin
        own = hasattr(kind, "create_masks_for_generate") or getattr(kind, "_auto_class", None) is not None
        same = kind.prepare_inputs_for_generation is standard.prepare_inputs_for_generation
        chunked = getattr(text_config(model.config), "attention_chunk_size", None) is not None
        self.fits = same and not own and not chunked
        self.last: Made | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude what belongs to a text."""
        return {**vars(self), "last": None}

    def __call__(self, ids: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a step. given: those of transformers' `prepare_inputs_for_generation`."""
        cache, mask, last = given.get(CACHE), given.get(MASK), self.last
        text = (mask is None or mask.ndim == 2) and "inputs_embeds" not in given
        if not self.fits or not text or cache is None or given.get("next_sequence_length") != 1:
            self.last = None
            return self.plainly(ids, given)
        seen, kept = ids.shape[1], {key: value for key, value in given.items() if key not in CHANGING}
        edits = cache.edits if isinstance(cache, DecodingCache) else 0
        follows = last is not None and last.cache() is cache and (last.edits, last.seen + 1) == (edits, seen)
        follows = follows and last is not None and same(last.given, kept)
        found = following(last.arguments, ids, given.get(POSITIONS), seen - 1) if last is not None and follows else None
        steady = found is not None
        if found is None or last is None or not last.steady:
            made = self.plainly(ids, given)
            wanted = {key: value for key, value in made.items() if key != CACHE}
            steady, found = found is not None and equal(found, wanted), wanted
        self.last = Made(found, kept, weakref.ref(cache), edits, seen, steady)
        return {**found, CACHE: cache}

    def plainly(self, ids: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments as transformers makes them."""
        kind: Any = type(self.model)
        found: dict[str, Any] = kind.prepare_inputs_for_generation(self.model, ids, **given)
        return found


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether mappings have the same objects."""
    return one.keys() == other.keys() and all(value is other[key] for key, value in one.items())


def following(arguments: dict[str, Any], ids: Tensor, positions: Any, column: int) -> dict[str, Any] | None:
    """The arguments of the step after that of these; None where they cannot be known.

    ids, positions: of the whole text. column: of the new token in masks.
    """
    mask = grown(arguments.get(MASK), column)
    if mask is None:
        return None
    found = {**arguments, IDS: ids[:, -1:].clone(), MASK: mask}
    if isinstance(positions, Tensor) and POSITIONS in found:
        found[POSITIONS] = positions[..., -1:].clone()
    return found


def grown(mask: Any, column: int) -> Any:
    """A mask, or masks by kinds of attention, for a token that sees one more, in this column; None: not known."""
    if isinstance(mask, dict):
        masks = {kind: grown(one, column) for kind, one in mask.items()}
        known = masks.keys() <= GROWING and all(one is not None for one in masks.values())
        return masks if known else None
    if not isinstance(mask, Tensor) or mask.ndim != 4 or column in (0, mask.shape[-1]):
        return None  # in the first token behind a window, what follows changes
    if column > mask.shape[-1]:
        return torch.cat([mask[..., 1:], mask[..., -1:]], dim=-1)
    mask = mask.clone()
    mask[..., column] = mask[..., column - 1]
    return mask


def equal(one: Any, other: Any) -> bool:
    """Whether arguments are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other
