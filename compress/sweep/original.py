"""The model before all passes, for passes that compare blocks which were compressed before the sweep."""

from __future__ import annotations

from collections.abc import Sequence

from compress.errors import ModelError
from compress.passes.contract.passes import ModelPass, Pass
from compress.sweep.capture import Captured
from compress.sweep.context import SweepState

SAME_STREAM = 0.1  # relative difference: rounded embeddings stay below it, another basis does not


def looks_back(steps: Sequence[tuple[str, Pass, Sequence[str]]]) -> str | None:
    """The label of the first pass that compares blocks with original ones that its sweep has not changed; None: none.

    No earlier pass of its sweep works on one of its linears, so they were compressed by an earlier sweep or run.
    """
    swept: set[str] = set()
    for where, step, names in steps:
        if step.requires.original and not swept & set(names):
            return where
        swept = set() if isinstance(step, ModelPass) else swept | set(names)
    return None


def same_stream(state: SweepState, original: Captured, source: str) -> None:
    """Raise ModelError unless the original model has as many blocks, and its first one gets the same states.

    state: before the first block. original: the capture of the probe in the original model.
    """
    found, wanted, remedy = (
        state.probe.float(),
        original.hidden.float(),
        "put it directly after the passes that compress",
    )
    if found.shape != wanted.shape or len(state.probe_calls) != len(original.calls):
        reason = "it has other blocks"
    else:
        apart = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
        reason = "" if apart <= SAME_STREAM else f"the states that enter the blocks differ by {apart:.0%}"
    if reason:
        raise ModelError(f"model: its blocks cannot be compared with those of {source}: {reason}; {remedy}")
