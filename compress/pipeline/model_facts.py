"""What a resolved recipe makes of the layers of its model: their final schemes and stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.layers.scheme import LayerScheme
from compress.models.caches.attentions import attentions_containing
from compress.models.caches.base import CachePolicy
from compress.models.computation import kept_dtype
from compress.models.structure.ends import find_ends
from compress.numerics.sparse.positions import SparseLayout, SparsePolicy
from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.passes import Pass
from compress.pipeline.resolve import ResolvedRecipe, layer_shapes, own_options, schemes_of


@dataclass(frozen=True)
class LayerFacts:
    """One linear in a block, or one compressed end, of the model in its final shape.

    Attributes:
        passes: Labels of the passes that work on it.
        scheme: Its final scheme.
        size_bytes: Its stored bytes.
        with_zeros_bytes: Its stored bytes if zeros of pruning are stored as other weights.
        transform_bytes: Further bytes of transforms that may stay at it; None if none may stay.
    """

    passes: tuple[str, ...]
    scheme: LayerScheme
    size_bytes: int
    with_zeros_bytes: int
    transform_bytes: int | None


ModelFacts = dict[str, LayerFacts]
"""The facts of layers by full name."""


def planned_policies(resolved: ResolvedRecipe) -> dict[str, CachePolicy]:
    """Return the cache policies that passes install, by the names of the attention modules."""
    return {
        attention: policy
        for _, step, names in resolved.steps
        if (policy := step.effects(ANY_LAYER).cache) is not None
        for attention in attentions_containing(resolved.form.model, names)
    }


def facts_of(resolved: ResolvedRecipe) -> ModelFacts:
    """Return the facts of the linears in the blocks, and of the ends that are compressed."""
    form, storage, format_ = resolved.form, resolved.storage, resolved.format
    starts, masks = schemes_of(form), form.weights.sparsities
    steps = [(label, step, set(names)) for label, step, names in resolved.steps]
    ends = [end.name for end in find_ends(form.model)]
    worked = {*form.linear_names(), *(n for n in ends if not starts[n].plain or any(n in names for *_, names in steps))}
    policy = resolved.recipe.save.sparse if format_.sparse else "off"
    facts: ModelFacts = {}
    for name in (name for name in layer_shapes(form) if name in worked):
        mine = [(label, step) for label, step, names in steps if name in names]
        layer = mine, name, starts[name], storage
        scheme = planned_scheme(*layer, policy, masks.get(name, ()))
        stored = LayerScheme(scheme.shape) if format_.adapt(scheme) is None else scheme
        size = format_.size_bytes(
            stored, kept_dtype(form.model, f"{name}.weight", storage) if stored.plain else storage
        )
        most = planned_scheme(*layer, policy, masks.get(name, ()), most=True)
        stays = most.transforms != scheme.transforms and format_.adapt(most) is not None
        transforms = format_.size_bytes(most, storage) - size if stays else None
        zeros = format_.size_bytes(planned_scheme(*layer, "off"), storage)
        facts[name] = LayerFacts(tuple(label for label, _ in mine), scheme, size, zeros, transforms)
    return facts


def planned_scheme(
    steps: Sequence[tuple[str, Pass]],
    name: str,
    start: LayerScheme,
    storage: torch.dtype,
    policy: SparsePolicy,
    layouts: Sequence[SparseLayout] = (),
    most: bool = False,
) -> LayerScheme:
    """The final storage scheme of a layer, as far as it is known before the run.

    start: the scheme before the first pass. policy: for sparse layers. layouts: the possible ways to store the mask
    that the layer starts with. most: with all transforms that may stay at the layer.
    """
    scheme = start
    for _, step in steps:
        effects = own_options(step, name).effects(scheme)
        scheme = effects.largest_scheme if most else effects.scheme
        layouts = effects.sparsities or layouts
    stored = scheme.sparse(layouts, storage, policy)
    return stored.folded(keep_zeros=stored.parts != scheme.parts)
