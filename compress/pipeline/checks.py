"""The checks of a recipe on a model, which `plan` prints and `run` passes before it starts.

A check raises the error of what a run would refuse, and returns notes on what a user should know before it. The errors
of all checks are raised together. A new check is a function, and its name in `CHECKS`. No check reads weights.
"""

from __future__ import annotations

from compress.blockwise.quantized_embeddings import embeddings_of
from compress.errors import TargetError
from compress.models.kinds.kinds import objective_of
from compress.models.structure.ends import find_ends
from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.problems import for_all
from compress.pipeline.formats import Check, check_formats
from compress.pipeline.model_facts import ModelFacts
from compress.pipeline.needs import check_imatrix, check_original, check_shared_inputs, check_teachers
from compress.pipeline.notes import (
    calibration_notes,
    check_experts,
    dense_notes,
    misread_notes,
    pass_notes,
    pruning_notes,
    storage_notes,
    stream_notes,
    transform_notes,
    undeclared_notes,
)
from compress.pipeline.readers import check_reader
from compress.pipeline.reference import note_on_reference
from compress.pipeline.resolve import ResolvedRecipe
from compress.pipeline.servers import check_servers
from compress.pipeline.texts import check_texts, texts_of


def check_cache(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Raise TargetError for a cache policy that the one file of a format cannot state."""
    for label, step, _ in resolved.steps:
        if step.effects(ANY_LAYER).cache is not None and resolved.format.file is not None:
            reason = f"format {resolved.format.name} cannot state a cache policy"
            raise TargetError(f"{label}: {reason}; its readers have options for this; remove the pass")
    return ()


def check_end_types(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Raise TargetError for a block type of an end that a pass compresses, which has the type of the pass's grid."""
    ends = embeddings_of(resolved.opened)
    options = {} if ends.tied else {ends.embedding: "embedding"}
    options |= {ends.head: "head"}
    for end in find_ends(resolved.opened.model):
        option = options.get(f"{end.name}.weight")
        value = "auto" if option is None else getattr(resolved.recipe.save, option)
        by = next((label for label, _, names in resolved.steps if end.name in names), None)
        if value != "auto" and by is not None:
            raise TargetError(
                f"save: {option}: {value} has no effect, since {by} compresses {end.name}; leave it out, or remove "
                f"{end.name} from the targets of the pass"
            )
    return ()


def check_evaluation(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Check the texts, and the objective of the evaluation; return how the recipe was fitted to the model."""
    opened = resolved.opened
    check_texts(resolved.recipe, opened)
    if texts_of(resolved.recipe.eval, opened.model):
        objective_of(opened.model, opened.tokenizer)  # it needs the mask token
    return resolved.fitted


OF_A_FORMAT: tuple[Check, ...] = (check_cache, check_reader, misread_notes, check_servers)
"""The checks of each further format."""


def check_further_formats(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Check each further format, and return its notes with its name."""
    return check_formats(resolved, facts, OF_A_FORMAT)


CHECKS: tuple[Check, ...] = (
    check_cache,
    check_end_types,
    check_imatrix,
    check_experts,
    check_teachers,
    check_original,
    check_shared_inputs,
    check_reader,
    note_on_reference,
    undeclared_notes,
    misread_notes,
    dense_notes,
    storage_notes,
    pruning_notes,
    pass_notes,
    calibration_notes,
    stream_notes,
    transform_notes,
    check_servers,
    check_further_formats,
    check_evaluation,
)
"""All checks, in the order of their notes."""


def check_all(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return the notes of all checks. Raises the error of the check that fails, or SeveralErrors."""
    notes = for_all(lambda check: check(resolved, facts), CHECKS)
    return [note for check_notes in notes for note in check_notes]
