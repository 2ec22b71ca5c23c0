"""The order of passes in a recipe: check it by facts, and name passes and facts in messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from compress.models.structure.ends import EMBEDDING, HEAD
from compress.passes.contract.facts import ANY_LAYER, Fact, Preparation
from compress.passes.contract.passes import Pass
from compress.passes.contract.problems import for_all
from compress.passes.contract.wording import recipe_error

USERS: dict[Fact, tuple[str, str]] = {"quantized": ("quantizing", "gptq"), "masked": ("pruning", "wanda")}
"""What kind of pass uses a preparation for a fact, and an example, for messages."""
DISJOINT = "remove one of the two, or give them disjoint targets"


def label(index: int, step: Pass) -> str:
    """Return the name of a pass in errors and reports: 'passes[1] gptq'."""
    return f"passes[{index}] {step.key()}"


def check_order(passes: Sequence[Pass], begun: bool = False) -> None:
    """Check that each pass has the facts it needs before and after it, and follows no pass that it excludes.

    When two passes may work on different layers, `pipeline.resolve` checks them layer by layer, with the model open.

    Args:
        passes: passes of a recipe in their order.
        begun: whether the model is the result of earlier passes, so that a missing fact is not an error yet.

    Raises:
        RecipeError: if the order is impossible.
    """
    for_all(partial(_check_place, passes, begun), range(len(passes)))


def _check_place(passes: Sequence[Pass], begun: bool, index: int) -> None:
    """Check one pass among those before and after it."""
    step = passes[index]
    place, earlier_passes = ("passes", index, step.key()), passes[:index]
    for i, earlier in enumerate(earlier_passes):
        for fact in sorted(step.never_after & _facts(earlier)):
            if _surely_meet(earlier, step):
                words = in_words(fact)
                message = f"the layers are already {words} by {label(i, earlier)}; put {step.key()} before it"
                if fact in _facts(step):
                    twice = f"twice, by {label(i, earlier)} and by this pass"
                    message = f"the same layers would be {words} {twice}; {DISJOINT}"
                raise recipe_error(place, message)
    for fact in sorted(step.after):
        if not begun and not any(fact in _facts(earlier) for earlier in earlier_passes):
            raise recipe_error(place, f"the model must be {in_words(fact)} first; put a pass that does so before it")
    prepares = step.effects(ANY_LAYER).prepares
    if prepares is not None and not any(prepares.fact in _facts(later) for later in passes[index + 1 :]):
        raise recipe_error(place, unprepared(prepares))


def _facts(step: Pass) -> frozenset[Fact]:
    return step.effects(ANY_LAYER).facts


def unprepared(prepares: Preparation) -> str:
    """Return the error message for a preparation that no later pass uses."""
    kind, example = USERS.get(prepares.fact, (f"that makes the model {in_words(prepares.fact)}", ""))
    missing = f"a {kind} pass after it, such as {example}" if example else f"a pass after it {kind}"
    return f"only {prepares.change}; add {missing}"


def _surely_meet(earlier: Pass, later: Pass) -> bool:
    """Return whether two passes share a layer in every model: one targets all blocks, or both have the same targets."""
    skipped = [step.effects(ANY_LAYER).skipped for step in (earlier, later)]
    everywhere = any(
        "*" in step.targets and not set(patterns) - {HEAD}
        for step, patterns in zip((earlier, later), skipped, strict=True)
    )
    everywhere = everywhere and not any(_ends_only(step) for step in (earlier, later))
    return everywhere or (earlier.targets, skipped[0]) == (later.targets, skipped[1])


def _ends_only(step: Pass) -> bool:
    """Return whether all targets name the embedding or the LM head, which are outside of the blocks."""
    return all(target.rpartition(".")[2] in (HEAD, EMBEDDING) for target in step.targets)


def in_words(fact: Fact) -> str:
    """Return the name of a fact in messages, such as 'pruned' for masked."""
    return {
        "masked": "pruned",
        "quantized": "quantized",
        "activations_quantized": "given quantized inputs",
        "cache_quantized": "given a quantized KV cache",
    }[fact]
