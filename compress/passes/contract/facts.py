"""Facts about layers, requirements of passes, and the type of the log function that a solver receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Fact = Literal["masked", "quantized", "activations_quantized", "cache_quantized"]
"""A property of a model after a pass; passes declare their order by facts, never by names of other passes."""

Log = Callable[..., None]
"""log(kind, message, **figures): writes to the journal."""


@dataclass(frozen=True)
class Requirements:
    """What a pass needs of the run that it is in.

    data: calibration token ids. reference: activations of the uncompressed model, which runs alongside the sweep.
    original: what the block made of the same inputs before the sweep, in which passes must have changed it.
    unquantized: the weight of a layer before a pass of the same sweep quantized it. teacher: the uncompressed model,
    which `run.open_teacher` then opens, or another one by its source. objective: what the model is asked for on the
    text, which `run.lm_objective` then says. training: several processes share its steps.
    batches: learning in steps of one calibration batch each, of which every process of a launcher needs a sequence.
    new_shape: the freedom to give the model another shape; then no layer at all may be what `never_after` says,
    targeted or not.
    """

    data: bool = False
    reference: bool = False
    original: bool = False
    unquantized: bool = False
    teacher: bool | str = False
    objective: bool = False
    training: bool = False
    batches: bool = False
    new_shape: bool = False


@dataclass(frozen=True)
class LayerFacts:
    """What is known of a linear before any work: its full name and its shape (out, in)."""

    name: str
    shape: tuple[int, int]
