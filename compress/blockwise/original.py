"""The model before all passes, for passes that compare it with blocks that were compressed before the sweep."""

from __future__ import annotations

from collections.abc import Sequence

from compress.blockwise.capture import Captured
from compress.blockwise.context import SweepState
from compress.errors import ModelError
from compress.passes.contract.passes import ModelPass, Pass

STREAM_TOLERANCE = 0.1  # relative error: quantized embeddings stay below it, a rotated basis does not


def needs_original(steps: Sequence[tuple[str, Pass, Sequence[str]]]) -> str | None:
    """Return the label of the first pass that compares blocks with original blocks from before its sweep.

    No earlier pass of its sweep works on one of its linears, so they were compressed by an earlier sweep or run.

    Returns:
        None if there is no such pass.
    """
    swept_names: set[str] = set()
    for label, step, names in steps:
        if step.requires.original and not swept_names & set(names):
            return label
        swept_names = set() if isinstance(step, ModelPass) else swept_names | set(names)
    return None


def check_same_stream(state: SweepState, original: Captured, source: str) -> None:
    """Check that the original model has as many blocks, and that its first block gets the same hidden states.

    Args:
        state: state before the first block.
        original: capture of the probe in the original model.
        source: name of the original model.

    Raises:
        ModelError: for a model that cannot be compared.
    """
    states, original_states, remedy = (
        state.probe.float(),
        original.hidden.float(),
        "put it directly after the passes that compress",
    )
    if states.shape != original_states.shape or len(state.probe_calls) != len(original.calls):
        reason = "it has other blocks"
    else:
        difference = float((states - original_states).norm() / original_states.norm().clamp(min=1e-30))
        reason = (
            "" if difference <= STREAM_TOLERANCE else f"the states that enter the blocks differ by {difference:.0%}"
        )
    if reason:
        raise ModelError(f"model: its blocks cannot be compared with those of {source}: {reason}; {remedy}")
