"""What a pass must be to work on the input embedding or the output head; checked before the run."""

from __future__ import annotations

from collections.abc import Sequence

from compress.errors import TargetError
from compress.models.structure.ends import End
from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.observers import Nothing
from compress.passes.contract.passes import LayerPass, Pass


def check_ends(step: Pass, ends: Sequence[End], label: str) -> None:
    """Raise TargetError if a pass cannot work on one of the ends that its targets name."""
    for end in ends:
        reason = _inside_only(step) or (None if end.embedding is None else _unfit_for_ids(step, end))
        if reason is not None:
            raise TargetError(
                f"{label}: {reason}; remove {' and '.join(end.names)} from its targets, and use another pass"
            )


def _inside_only(step: Pass) -> str | None:
    """Return why a pass works on the linears inside the blocks only; None if it also works on ends."""
    needs, effects = step.requires, step.effects(ANY_LAYER)
    scope = "the linears inside the blocks, not on the output head or the embedding"
    if not isinstance(step, LayerPass) or "quantized" not in effects.facts or needs.new_shape:
        return f"it works on {scope}, which only passes that quantize one layer at a time take"
    if effects.sparsities:
        return f"it prunes {scope}"
    if step.survey() is not None:
        return f"it divides a budget among {scope}"
    if needs.reference or needs.original or needs.unquantized:
        option = " (error: asymmetric)" if getattr(step, "error", None) == "asymmetric" else ""
        return f"it compares a layer with the uncompressed one{option}, on {scope}"
    return None


def _unfit_for_ids(step: Pass, end: End) -> str | None:
    """Return why a pass cannot work on an embedding, whose inputs are token ids; None if it can."""
    assert isinstance(step, LayerPass)
    layer_step = step.for_layer(end.name) or step
    assert isinstance(layer_step, LayerPass)
    tied = f"{end.embedding} is tied to {end.head}, and the" if end.head else "the"
    if layer_step.observer is not Nothing or layer_step.requires.layer_observer is not None:
        return f"it calibrates on the inputs of a layer, but {tied} inputs of {end.embedding} are token ids"
    if layer_step.effects(ANY_LAYER).scheme.rounding is not None and end.head is None:
        return f"it rounds the inputs of a layer, but the inputs of {end.embedding} are token ids"
    return None
