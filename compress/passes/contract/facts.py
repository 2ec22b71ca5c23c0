"""What a pass declares: facts, requirements and effects; and the type of the log function that a solver receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from compress.layers.base import TransformScheme
from compress.layers.scheme import LayerScheme
from compress.models.caches.base import CachePolicy
from compress.numerics.sparse.positions import SparseLayout

if TYPE_CHECKING:
    from compress.passes.contract.observers import Observer
    from compress.passes.contract.passes import Pass

Fact = Literal["masked", "quantized", "activations_quantized", "cache_quantized"]
"""A property of a model after a pass; passes declare their order by facts, never by names of other passes."""

Log = Callable[..., None]
"""log(kind, message, **figures): writes to the journal."""


MakeObserver = Callable[[int, torch.device], "Observer"]
"""Make an observer of inputs of a width on a device."""


@dataclass(frozen=True)
class Requirements:
    """What a pass needs of the run that it is in.

    Attributes:
        data: calibration token ids.
        reference: activations of the uncompressed model, which runs alongside the sweep.
        original: outputs of the block for the same inputs before the sweep, in which passes must have changed it.
        unquantized: the weight of a layer before a pass of the same sweep quantized it.
        layer_observer: makes a further observer of the inputs of one layer, which becomes `Layer.inputs`.
        replays: statistics of a block's inputs may be collected in several runs of the block; only for block passes,
            which read them by `BlockInputs.replayed`.
        by_rows: the rows of a weight are independent, so several processes may each solve some of them.
        teacher: the uncompressed model (True) or another model by its source, which `run.open_teacher` opens.
        paired_states: hidden states of the model are compared with those of the teacher, of the blocks in `layer_map`.
        layer_map: pairs (block of the model, block of the teacher); None: evenly spaced.
        objective: the objective of the model on the text, `run.lm_objective`.
        training: several processes share its steps.
        new_sequences: sequences that each process reads of a calibration text that is a stream; 0: training on the
            sequences of the calibration; None: no training on text.
        fixed_text: why the pass cannot read new sequences, and what to write; None: it can.
        trains: kinds of parameters that must exist in the layers of the pass.
        weights_option: option that is of no use without dense weights to train; None: none is stated.
        batches: learning in steps of one calibration batch each, of which every process of a launcher needs a sequence.
        new_shape: the model gets another shape; then no layer at all may be what `never_after` says, targeted or not.
        rehearsal: the pass that a plan runs on random weights, to find structures that the pass refuses: a pass over
            the whole model with `new_shape`, or a block pass that needs no data; None: no rehearsal.
        experts: the blocks of the model must have experts.
        imatrix: file of an importance matrix of llama.cpp with an entry for each layer, `Layer.importance`.
    """

    data: bool = False
    reference: bool = False
    original: bool = False
    unquantized: bool = False
    layer_observer: MakeObserver | None = None
    replays: bool = False
    by_rows: bool = False
    teacher: bool | str = False
    paired_states: bool = False
    layer_map: tuple[tuple[int, int], ...] | None = None
    objective: bool = False
    training: bool = False
    new_sequences: int | None = None
    fixed_text: str | None = None
    trains: tuple[str, ...] = ()
    weights_option: str | None = None
    batches: bool = False
    new_shape: bool = False
    rehearsal: Pass | None = None
    experts: bool = False
    imatrix: str | None = None


@dataclass(frozen=True)
class RequiredSparsity:
    """The sparsity that a pruning pass must reach in a layer.

    Attributes:
        requested_sparsity: requested fraction of zeros.
        expected_sparsity: fraction of zeros after `requested_sparsity` is rounded to whole units of the pattern;
            columns and rows that the pattern does not cover stay dense and are not counted as zeros.
    """

    requested_sparsity: float
    expected_sparsity: float


ANY_LAYER = LayerScheme((1, 1))
"""A dense layer of unknown shape, for effects that do not depend on the layer: facts, cache, skipped, notes."""


def _suits(later: Effects) -> str | None:
    return None


@dataclass(frozen=True)
class Preparation:
    """What a later pass must do to the layers of a pass that is of no use alone.

    Attributes:
        fact: the fact that a later pass must make true.
        mismatch: maps the effects of that later pass on a dense layer to the reason why the layer is not prepared for
            it, or None.
        change: what the pass does to a layer, for the error without such a later pass: 'only CHANGE'.
    """

    fact: Fact
    mismatch: Callable[[Effects], str | None] = _suits
    change: str = "prepares layers"


@dataclass(frozen=True)
class Effects:
    """The effects of a pass on a layer, as far as they are known before the run.

    Attributes:
        scheme: storage scheme of the layer after the pass.
        facts: facts that are true of the layer after the pass.
        transforms: schemes of input transforms that stay at the layer if no earlier module can absorb them, which only
            the run decides; each replaces the transform of its kind in `scheme`.
        problem: reason why the pass cannot work on a layer of this shape, or None.
        prepares: what a later pass must do to the layer; None: nothing.
        sparsities: possible storage schemes of the mask; empty if the pass makes no mask.
        zeros: sparsity that the layer must reach; None: the pass does not prune.
        uneven: whether layers differ in sparsity, so that only the mean of `zeros` over all layers, weighted by size,
            is reached.
        cache: cache policy of the attention modules that contain the layer; None: none.
        negative_scales: whether scales are negative where the readers of the format take negative ones.
        skipped: patterns of layers that match the targets of the pass, but are skipped.
        notes: sentences for the plan.
    """

    scheme: LayerScheme
    facts: frozenset[Fact] = frozenset()
    transforms: tuple[TransformScheme, ...] = ()
    problem: str | None = None
    prepares: Preparation | None = None
    sparsities: tuple[SparseLayout, ...] = ()
    zeros: RequiredSparsity | None = None
    uneven: bool = False
    cache: CachePolicy | None = None
    negative_scales: bool = False
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def refusal(self) -> str | None:
        """The problem, or the reason why a part or a transform of `scheme` does not fit the layer."""
        return self.problem or self.scheme.refused

    @property
    def largest_scheme(self) -> LayerScheme:
        """The storage scheme with all `transforms`."""
        scheme = self.scheme
        for transform in self.transforms:
            scheme = scheme.with_transform(transform)
        return scheme
