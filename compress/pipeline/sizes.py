"""The size of a checkpoint as a budget: what the embedding, the head and other tensors leave for the bits of layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from compress.blockwise.quantized_embeddings import embeddings_of
from compress.checkpoint.save import outside_dense
from compress.errors import TargetError
from compress.models.structure.ends import find_ends
from compress.passes.contract.limits import size_of
from compress.passes.contract.passes import SizedPass
from compress.pipeline.model_facts import facts_of
from compress.pipeline.resolve import ResolvedRecipe
from compress.pipeline.stored_bytes import rest_bytes, rest_of
from compress.recipe.tables import megabytes


def within_size(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Return the recipe with the bits that the size of its checkpoint leaves; unchanged without a pass with a size.

    Where the format has block types of embedding and head, and the recipe states none, those that suit these bits are
    chosen.

    Raises:
        TargetError: for two passes with a size, or one that the choices cannot reach.
    """
    sized = [(i, step) for i, (_, step, _) in enumerate(resolved.steps) if isinstance(step, SizedPass)]
    targets = [(i, target) for i, step in sized if (target := step.size_target)]
    if not targets:
        return resolved
    (index, target), (label, _, names) = targets[0], resolved.steps[targets[0][0]]
    if len(targets) > 1:
        raise TargetError(
            f"{resolved.steps[targets[1][0]][0]} allocate: {label} has a size already; write bits for one"
        )
    stored_bytes = partial(resolved.format.size_bytes, storage=resolved.storage)
    shapes = {name: resolved.shapes[name] for name in names if target.divides(name)}
    weights, layers = sum(map(prod, shapes.values())), target.limits(shapes, stored_bytes)
    candidates, size_bytes = list(_candidates(resolved, shapes)), size_of(target.size, "size")
    candidate = _suited(candidates, size_bytes, layers, weights)
    if candidate is None:
        raise TargetError(f"{label} allocate: {_impossible(target.size, size_bytes, candidates, layers)}")
    left = size_bytes - candidate.other_bytes
    steps = list(resolved.steps)
    steps[index] = label, target.within(shapes, left, stored_bytes), names
    note = (
        f"{label} allocate: size {target.size}: {megabytes(candidate.other_bytes)} MB are not of its layers, which get"
    )
    ends = f"; {_ends_text(candidate.resolved)}" if resolved.format.ends_typed else ""
    notes = (*resolved.fitted, f"{note} {8 * left / weights:.3g} bits per weight{ends}")
    return replace(candidate.resolved, steps=tuple(steps), fitted=notes, target_bytes=size_bytes)


@dataclass(frozen=True)
class _Candidate:
    """The recipe with some block types of embedding and head.

    least: the fewest bits of layers that they are for. other_bytes: of everything but the layers that share the size.
    """

    least: float
    resolved: ResolvedRecipe
    other_bytes: int


def _candidates(resolved: ResolvedRecipe, shapes: Mapping[str, tuple[int, int]]) -> Iterator[_Candidate]:
    """Yield the candidates from the largest to the smallest. shapes: of the layers that share the size."""
    form, storage, format_, facts = resolved.form, resolved.storage, resolved.format, facts_of(resolved)
    ends = [end for end in find_ends(form.model) if end.name in facts]
    tensors = {name: tuple(tensor.shape) for name, tensor in outside_dense(form).items()}
    for block in form.blocks:
        tensors |= {name: tuple(tensor.shape) for name, tensor in rest_of(block).items()}
    tensors |= {f"{name}.weight": layer.scheme.shape for name, layer in facts.items()}
    fixed = sum(layer.size_bytes for name, layer in facts.items() if name not in shapes)
    fixed += format_.header_bytes(embeddings_of(form), tensors)
    fixed += form.undeclared_bytes if format_.file is None else 0
    save = resolved.recipe.save
    is_open = (save.embedding, save.head) == ("auto", "auto") and not ends  # a pass decides on those in `ends`
    for least, embedding, head in format_.end_types if is_open else ((0.0, save.embedding, save.head),):
        changed = save.model_copy(update={"embedding": embedding, "head": head})
        recipe = resolved.recipe.model_copy(update={"save": changed})
        candidate = replace(resolved, recipe=recipe, format=changed.target().stored_in(storage))
        yield _Candidate(least, candidate, fixed + rest_bytes(form, storage, ends, candidate.format))


def _suited(candidates: Sequence[_Candidate], target: int, layers: Sequence[float], weights: int) -> _Candidate | None:
    """Return the candidate for a size, or None if it is impossible.

    layers: the smallest and the largest bytes of all layers that share the size. weights: of these layers.
    """
    possible = [candidate for candidate in candidates if candidate.other_bytes + layers[0] <= target]
    if not possible or candidates[0].other_bytes + layers[1] < target:
        return None
    suited = [c for c in possible if 8 * (target - c.other_bytes) >= c.least * weights] or possible[-1:]
    index = possible.index(suited[0])
    while index and possible[index].other_bytes + layers[1] < target:  # bits would be left over
        index -= 1
    return possible[index]


def _ends_text(resolved: ResolvedRecipe) -> str:
    save, ends = resolved.recipe.save, embeddings_of(resolved.form)
    return f"embedding and head {save.head}" if ends.tied else f"embedding {save.embedding}, head {save.head}"


def _impossible(stated: str | int, target: int, candidates: Sequence[_Candidate], layers: Sequence[float]) -> str:
    """Return why no choices make a checkpoint of a size."""
    smallest, largest = candidates[-1].other_bytes + layers[0], candidates[0].other_bytes + layers[1]
    if target < smallest:
        return (
            f"size {stated} is too small: the smallest choices take {math.ceil(smallest / 1e4) / 100:.2f} MB, "
            f"{megabytes(candidates[-1].other_bytes)} MB of it outside of these layers; write that size or more"
        )
    return (
        f"size {stated} is more than the {math.floor(largest / 1e4) / 100:.2f} MB that the largest choices take; write "
        "less, or the scheme of the largest choice, which needs no size"
    )
