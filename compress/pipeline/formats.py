"""The further formats of a recipe, as a plan sees them: the first checkpoint is converted to each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from compress.blockwise.quantized_embeddings import embeddings_of
from compress.checkpoint.formats.base import Format
from compress.errors import TargetError, UserError
from compress.layers.scheme import LayerScheme
from compress.passes.contract.problems import Problems
from compress.pipeline.convert import Conversion
from compress.pipeline.model_facts import ModelFacts
from compress.pipeline.resolve import ResolvedRecipe, check_model, own_options, schemes_of

Check = Callable[[ResolvedRecipe, ModelFacts], Sequence[str]]
"""A check of a recipe on a model, which returns notes."""

REMEDY = "Leave {name} out of the formats, or convert the checkpoint after the run with compress export and requantize"


def conversion_to(format_: Format) -> Conversion:
    """Return the conversion of a finished checkpoint to a further format of its recipe.

    Codes stay, but where the format fixes a dtype of scales that cannot represent them.
    """
    label, remedy = f"save: format {format_.name}", REMEDY.format(name=format_.name)
    return Conversion(format_, rescale=True, label=label, remedy=remedy)


def in_format(resolved: ResolvedRecipe, name: str) -> ResolvedRecipe:
    """Return the resolved recipe that writes one of its formats alone."""
    recipe = resolved.recipe.in_format(name)
    return replace(resolved, recipe=recipe, format=recipe.save.target().stored_in(resolved.storage))


def further_formats(resolved: ResolvedRecipe, facts: ModelFacts) -> Iterator[tuple[ResolvedRecipe, ModelFacts]]:
    """Yield the resolved recipe of each further format, with its layers as the format stores them.

    Raises:
        TargetError: for a layer that a format cannot hold.
    """
    first = resolved.format
    for name in resolved.recipe.save.formats[1:]:
        other = in_format(resolved, name)
        stored = {layer: _stored(first, fact.scheme) for layer, fact in facts.items()}
        coded = {layer: scheme for layer, scheme in stored.items() if not scheme.plain}
        if not coded and any(fact.scheme.quantized for fact in facts.values()):
            raise TargetError(
                f"save: format {first.name} stores dequantized weights, which cannot be converted to {name}; write "
                f"{name} before {first.name}"
            )
        targets = _targets(other.format, coded, {layer: fact.scheme for layer, fact in facts.items()}, first)
        changed = {}
        for layer, fact in facts.items():
            scheme = targets.get(layer, stored[layer])
            size = other.format.size_bytes(scheme, resolved.storage) if layer in targets else fact.size_bytes
            changed[layer] = replace(fact, scheme=scheme, size_bytes=size)
        yield other, changed


def check_formats(resolved: ResolvedRecipe, facts: ModelFacts, checks: Sequence[Check]) -> list[str]:
    """Apply the checks of one format to each further format, and check that it can hold every layer.

    Returns:
        The notes of the checks.

    Raises:
        TargetError: for a layer that a format cannot hold; the message names the format.
        ModelError: for a model that a format cannot hold.
        SeveralErrors: for several mistakes.
    """
    problems, notes = Problems(), list[str]()
    for name in resolved.recipe.save.formats[1:]:
        problems.attempt(check_model, in_format(resolved, name).format, resolved.opened)
        problems.attempt(_check_ends, resolved, name)
        problems.attempt(_check_alternatives, resolved, name)
    problems.check()
    for other, layers in further_formats(resolved, facts):
        for check in checks:
            notes += problems.attempt(check, other, layers) or ()
    problems.check()
    return notes


def _check_ends(resolved: ResolvedRecipe, name: str) -> None:
    """Raise TargetError if the first format rounds a dense embedding or LM head otherwise than a further one."""
    opened, first, other = resolved.opened, resolved.format, in_format(resolved, name).format
    compressed = {f"{layer}.weight" for _, _, names in resolved.steps for layer in names}
    ends, state = embeddings_of(opened), dict(opened.model.named_parameters())
    for weight in ends.weights:
        if weight not in state or weight in compressed:
            continue
        layout = first.end_layout(ends, weight, state[weight].shape)
        if layout is not None and other.end_layout(ends, weight, state[weight].shape) != layout:
            raise TargetError(
                f"save: format {first.name} rounds {weight} to {layout.text}, and {name} would be converted from it; "
                f"list {name} before {first.name}"
            )


def _stored(first: Format, scheme: LayerScheme) -> LayerScheme:
    """Return the scheme of a layer that is read from a checkpoint of the first format."""
    adapted = first.adapt(scheme)
    if adapted is None:
        return LayerScheme(scheme.shape)
    before, after = scheme.codes, adapted.codes
    if before is None or after is None or before.grid != after.grid or not before.symmetric:
        return adapted
    return adapted.with_parts(replace(after, symmetric=True))  # the conversion removes zero points that are all zero


def _targets(
    format_: Format, coded: dict[str, LayerScheme], solved: dict[str, LayerScheme], first: Format
) -> dict[str, LayerScheme]:
    """Return the schemes of layers in a further format.

    Args:
        format_: the further format.
        coded: schemes of compressed layers in the first format.
        solved: schemes of layers as passes leave them.
        first: the first format.

    Raises:
        TargetError: for a layer that the format cannot store; if it could store the layer as passes leave it, the
            message says that it must be the first one.
    """
    conversion = conversion_to(format_)
    try:
        return conversion.targets(coded)
    except TargetError as error:
        try:
            conversion.targets({name: solved[name] for name in coded})
        except TargetError:
            raise error from None
        raise TargetError(
            f"save: format {format_.name} cannot store what format {first.name} makes of the layers; list "
            f"{format_.name} before {first.name}"
        ) from error


def _check_alternatives(resolved: ResolvedRecipe, name: str) -> None:
    """Raise TargetError if a format cannot store one of the schemes that a pass may choose during the run."""
    conversion, schemes = conversion_to(in_format(resolved, name).format), schemes_of(resolved.opened)
    for label, step, names in resolved.steps:
        survey = step.survey()
        layers = [] if survey is None else [layer for layer in names if own_options(step, layer) is step]
        for layer in layers:
            assert survey is not None
            for variant in survey.alternatives(schemes[layer].shape):
                scheme = _stored(resolved.format, variant.effects(schemes[layer]).scheme)
                try:
                    conversion.targets({layer: scheme})
                except UserError as error:
                    raise TargetError(f"{label}: {error}") from error
