"""The arguments of decode steps, derived from those of the previous step.

transformers computes the positions and the mask of every step again, which takes as long as several layers of a small
model. Here it computes those of two steps of each text, and of two steps after a sliding window is full. If the second
step follows from the first, all further steps are derived.
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
from compress.models.kinds.contract import text_config

IDS, MASK, POSITIONS, CACHE = "input_ids", "attention_mask", "position_ids", "past_key_values"
CHANGING = {MASK, POSITIONS, CACHE}
GROWING = {"full_attention", "sliding_attention"}
"""Kinds of attention whose mask grows by the new token; a full sliding window drops its oldest token."""


@dataclass(frozen=True)
class PreparedArguments:
    """The arguments of a decode step without its cache.

    Attributes:
        arguments: arguments of the forward pass.
        constant_kwargs: arguments of `prepare_inputs_for_generation` that are equal in every step.
        cache: cache of the text.
        edits: number of edits of the cache.
        token_count: tokens of the text, including the new token.
        is_predictable: whether the arguments follow from those of the previous step.
    """

    arguments: dict[str, Any]
    constant_kwargs: dict[str, Any]
    cache: weakref.ref[Cache]
    edits: int
    token_count: int
    is_predictable: bool


class StepArguments:
    """Prepare the arguments of the model for one more token per sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        model_class: Any = type(model)
        standard: Any = GenerationMixin
        has_custom_masks = (
            hasattr(model_class, "create_masks_for_generate") or getattr(model_class, "_auto_class", None) is not None
        )
        is_standard = model_class.prepare_inputs_for_generation is standard.prepare_inputs_for_generation
        is_chunked = getattr(text_config(model.config), "attention_chunk_size", None) is not None
        self.is_supported = is_standard and not has_custom_masks and not is_chunked
        self.previous: PreparedArguments | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the arguments of the previous step."""
        return {**vars(self), "previous": None}

    def __call__(self, ids: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Prepare the arguments of a step.

        Args:
            ids: tokens of the whole text.
            model_kwargs: keyword arguments of transformers' `prepare_inputs_for_generation`.
        """
        cache, mask, previous = model_kwargs.get(CACHE), model_kwargs.get(MASK), self.previous
        is_text = (mask is None or mask.ndim == 2) and "inputs_embeds" not in model_kwargs
        if not self.is_supported or not is_text or cache is None or model_kwargs.get("next_sequence_length") != 1:
            self.previous = None
            return self.prepare_with_transformers(ids, model_kwargs)
        token_count, constant_kwargs = (
            ids.shape[1],
            {key: value for key, value in model_kwargs.items() if key not in CHANGING},
        )
        edits = cache.edits if isinstance(cache, DecodingCache) else 0
        follows = (
            previous is not None
            and previous.edits == edits
            and previous.cache() is cache
            and previous.token_count + 1 == token_count
            and same_objects(previous.constant_kwargs, constant_kwargs)
        )
        arguments = (
            next_arguments(previous.arguments, ids, model_kwargs.get(POSITIONS), token_count - 1)
            if previous is not None and follows
            else None
        )
        is_predictable = arguments is not None
        if arguments is None or previous is None or not previous.is_predictable:
            reference_inputs = self.prepare_with_transformers(ids, model_kwargs)
            reference = {key: value for key, value in reference_inputs.items() if key != CACHE}
            is_predictable, arguments = arguments is not None and equal_arguments(arguments, reference), reference
        self.previous = PreparedArguments(
            arguments, constant_kwargs, weakref.ref(cache), edits, token_count, is_predictable
        )
        return {**arguments, CACHE: cache}

    def prepare_with_transformers(self, ids: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Prepare the arguments with the method of transformers."""
        model_class: Any = type(self.model)
        arguments: dict[str, Any] = model_class.prepare_inputs_for_generation(self.model, ids, **model_kwargs)
        return arguments


def same_objects(first_mapping: Mapping[str, Any], second_mapping: Mapping[str, Any]) -> bool:
    """Return whether two mappings hold the same objects."""
    return first_mapping.keys() == second_mapping.keys() and all(
        value is second_mapping[key] for key, value in first_mapping.items()
    )


def next_arguments(arguments: dict[str, Any], ids: Tensor, positions: Any, column: int) -> dict[str, Any] | None:
    """Derive the arguments of a step from those of the previous step.

    Args:
        arguments: arguments of the previous step.
        ids: tokens of the whole text.
        positions: positions of the whole text.
        column: column of the new token in masks.

    Returns:
        None for arguments that cannot be derived.
    """
    mask = extended_mask(arguments.get(MASK), column)
    if mask is None:
        return None
    step_arguments = {**arguments, IDS: ids[:, -1:].clone(), MASK: mask}
    if isinstance(positions, Tensor) and POSITIONS in step_arguments:
        step_arguments[POSITIONS] = positions[..., -1:].clone()
    return step_arguments


def extended_mask(mask: Any, column: int) -> Any:
    """Extend a mask, or masks by kind of attention, by the new token.

    Returns:
        None for a mask that cannot be extended.
    """
    if isinstance(mask, dict):
        masks = {kind: extended_mask(layer_mask, column) for kind, layer_mask in mask.items()}
        is_supported = masks.keys() <= GROWING and all(layer_mask is not None for layer_mask in masks.values())
        return masks if is_supported else None
    if not isinstance(mask, Tensor) or mask.ndim != 4 or column in (0, mask.shape[-1]):
        return None  # the first step after a window is full changes the rule
    if column > mask.shape[-1]:
        return torch.cat([mask[..., 1:], mask[..., -1:]], dim=-1)
    mask = mask.clone()
    mask[..., column] = mask[..., column - 1]
    return mask


def equal_arguments(a: Any, b: Any) -> bool:
    """Return whether two values of arguments are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_arguments(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a is b
