"""The order of passes in a recipe: check it by facts, and name passes and facts in messages."""

from __future__ import annotations

from collections.abc import Sequence

from compress.models.structure.ends import EMBEDDING, HEAD
from compress.passes.contract.facts import ANY_LAYER, Fact
from compress.passes.contract.passes import Pass
from compress.passes.contract.wording import recipe_error

DISJOINT = "remove one of the two, or give them disjoint targets"


def label(index: int, step: Pass) -> str:
    """The name of a pass in errors and reports: 'passes[1] gptq'."""
    return f"passes[{index}] {step.key()}"


def check_order(passes: Sequence[Pass], begun: bool = False) -> None:
    """Raise RecipeError when a pass lacks a fact that it needs before or after it, or follows one that it excludes.

    begun: the model is the result of earlier passes, so a missing fact is no mistake yet. When two passes may work on
    different layers, `pipeline.resolve` checks them layer by layer, with the model open.
    """
    made: list[tuple[str, Pass]] = []
    for index, step in enumerate(passes):
        for before, earlier in made:
            for fact in sorted(step.never_after & _facts(earlier)):
                if _surely_meet(earlier, step):
                    message = f"the layers are already {in_words(fact)} by {before}; put {step.key()} before it"
                    if fact in _facts(step):
                        message = (
                            f"the same layers would be {in_words(fact)} twice, by {before} and by this pass; {DISJOINT}"
                        )
                    raise recipe_error(("passes", index, step.key()), message)
        for fact in sorted(step.after):
            if not begun and not any(fact in _facts(earlier) for _, earlier in made):
                message = f"the model must be {in_words(fact)} first; put a pass that does so before it"
                raise recipe_error(("passes", index, step.key()), message)
        made.append((label(index, step), step))
    for index, step in enumerate(passes):
        prepares = step.effects(ANY_LAYER).prepares
        if prepares is not None and not any(prepares.fact in _facts(later) for later in passes[index + 1 :]):
            raise recipe_error(("passes", index, step.key()), unprepared(prepares.fact))


def _facts(step: Pass) -> frozenset[Fact]:
    return step.effects(ANY_LAYER).facts


def unprepared(fact: Fact) -> str:
    """The mistake of a preparation that no pass follows."""
    return f"it is a preparation, but no later pass makes the model {in_words(fact)}; put one that does so after it"


def _surely_meet(first: Pass, second: Pass) -> bool:
    """Whether two passes share a layer in every model: one targets all blocks, or both have the same targets."""
    skipped = [step.effects(ANY_LAYER).skipped for step in (first, second)]
    everywhere = any(
        "*" in step.targets and not set(patterns) - {HEAD}
        for step, patterns in zip((first, second), skipped, strict=True)
    )
    everywhere = everywhere and not any(_ends_only(step) for step in (first, second))
    return everywhere or (first.targets, skipped[0]) == (second.targets, skipped[1])


def _ends_only(step: Pass) -> bool:
    """Whether all targets name the embedding or the head, which are outside of the blocks."""
    return all(target.rpartition(".")[2] in (HEAD, EMBEDDING) for target in step.targets)


def in_words(fact: Fact) -> str:
    """The name of a fact in messages, such as 'pruned' for masked."""
    return {
        "masked": "pruned",
        "quantized": "quantized",
        "activations_quantized": "given quantized inputs",
        "cache_quantized": "given a quantized KV cache",
    }[fact]
