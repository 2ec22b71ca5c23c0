"""Depth pruning: drop blocks with the least influence, or with the least increase of the loss (Men 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import CannotRun, ModelError, TargetError, call_foreign, one_line
from compress.layers.linear import linears
from compress.models.forward import device_of_model, logits_of, mean_loss, skipping, states
from compress.models.kinds.batch import Batch, Examples
from compress.models.kinds.contract import ModelKind
from compress.models.kinds.headless import check_learns
from compress.models.reshape.reconfigure import build, renumbered, replace_in_place, tensors, with_blocks
from compress.models.structure.blocks import Block, find_blocks
from compress.numerics.metrics import relative_error
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Requirements
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.passes import works_on
from compress.passes.families.reshaping import ReshapingPass

SAME = 1e-2  # relative: equal sums give 0, half precision in another order 5e-3, a wrong block more


class DropBlocks(ReshapingPass):
    """Remove whole transformer blocks, the least important first; the result is a stock model with fewer blocks.

    `by` ranks the blocks:

    - influence: BI = 1 - E cos(x_in, x_out) over all calibration tokens (ShortGPT, eq. 1), measured once.
    - loss: remove the block with the least increase of the loss, then repeat this in the smaller model. Each removal
      runs the text once per remaining block.
    - spacing: keep the first block, the last block, and evenly spaced blocks between them, as a start for distillation
      (Sanh 2019, arXiv 1910.01108, section 3).

    A block is kept if targets and ignore exclude any of its linears.
    """

    use_for: ClassVar[str] = (
        "Fewer blocks: a stock model that is faster on every device and in every program. Train it by distill "
        "afterwards."
    )
    not_for: ClassVar[str] = (
        "A first step: remove feed-forward channels with narrow before whole blocks. Most models need training after "
        "a removed block."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2403.03853"

    count: int | None = Field(default=None, ge=1, description="number of blocks to remove")
    sparsity: float | None = Field(
        default=None, gt=0, lt=1, description="instead of count: fraction of all blocks to remove"
    )
    by: Literal["influence", "loss", "spacing"] = Field(
        default="influence",
        description="influence: change of direction from input to output; loss: increase of the loss; spacing: evenly",
    )
    keep: tuple[int, ...] = Field(default=(), description="numbers of blocks to keep, from 0; -1 is the last")
    contiguous: bool = Field(default=False, description="remove contiguous blocks, which are scored together")
    sequences: int | None = Field(default=None, ge=1, description="number of calibration sequences to use; null: all")

    def model_post_init(self, context: Any) -> None:
        if (self.count is None) == (self.sparsity is None):
            raise ValueError("give exactly one of count and sparsity")
        if self.by == "spacing" and (self.keep or self.contiguous or self.sequences):
            raise ValueError("by: spacing fixes the removed blocks; leave keep, contiguous and sequences out")

    @property
    def requires(self) -> Requirements:
        fixed = self.by == "spacing"  # otherwise the data decide which blocks are removed, and so the errors
        return replace(super().requires, objective=self.by == "loss", rehearsal=self if fixed else None)

    def adapt_objective(self, lm_objective: ModelKind, label: str) -> ModelKind:
        check_learns(lm_objective, label, "write by: influence")
        return lm_objective

    def memory(self, size: ProblemSize) -> int:
        """Return the logits of a sequence; by influence the hidden states between all blocks, in float32, with them."""
        states = 4 * size.length * size.outputs if self.by == "influence" else 0
        return states + size.forward_bytes + (size.itemsize + 4) * size.length * size.vocabulary

    def outcome(self, model: PreTrainedModel, label: str) -> PretrainedConfig:
        """Return the configuration with fewer blocks; the calibration text decides later which blocks are removed."""
        blocks = find_blocks(model)
        return with_blocks(model, _rest(blocks, self._last(self._choices(blocks, label), blocks, label)))

    def apply(self, model: nn.Module, run: Run) -> None:
        assert isinstance(model, PreTrainedModel) and run.calibration is not None
        label, examples, blocks = run.label or self.key(), run.calibration[: self.sequences], find_blocks(model)
        removed = self._chosen(model, examples, run, label)
        kept_blocks = _rest(blocks, removed)
        with skipping(blocks, removed):
            expected_logits = logits_of(model, examples[0])
        tensor_of = tensors(model)
        weights = {new: tensor_of[old] for old, new in renumbered(model, kept_blocks).items()}
        new = build(model, with_blocks(model, kept_blocks), weights)
        error = relative_error(logits_of(new, examples[0]), expected_logits)
        if not error < SAME:
            raise ModelError(
                f"{label}: the model of {len(kept_blocks)} blocks differs from the model that skips the others "
                f"(relative error {error:.2g}): a block depends on its position; remove other blocks"
            )
        _check_runs(new, examples[0], removed, label)
        replace_in_place(model, new)

    def _number(self, blocks: Sequence[Block], label: str) -> int:
        """Return the number of blocks to remove."""
        number = self.count if self.sparsity is None else round(self.sparsity * len(blocks))
        assert number is not None
        if number == 0:
            raise TargetError(f"{label}: sparsity {self.sparsity:g} of {len(blocks)} blocks removes none; use count: 1")
        if len(blocks) == 1:
            raise TargetError(f"{label}: cannot remove {number} of 1 blocks, the only one; leave this pass out")
        if number >= len(blocks):
            raise TargetError(f"{label}: cannot remove {number} of {len(blocks)} blocks; use at most {len(blocks) - 1}")
        return number

    def _choices(self, blocks: Sequence[Block], label: str) -> list[tuple[int, ...]]:
        """Return the candidates: runs of contiguous blocks, one of which is removed, or single blocks."""
        number = self._number(blocks, label)
        if wrong := [i for i in self.keep if not -len(blocks) <= i < len(blocks)]:
            raise TargetError(f"{label}: keep names block {wrong[0]}, but the last one is {len(blocks) - 1}")
        kept_indices = {i % len(blocks) for i in self.keep}
        targeted = [b.index for b in blocks if all(works_on(self, f"{b.name}.{name}") for name in linears(b.module))]
        free = [i for i in targeted if i not in kept_indices]
        if self.by == "spacing":
            return self._spaced(number, free, blocks, label)
        long = number if self.contiguous else 1
        runs = [tuple(range(i, i + long)) for i in range(len(blocks) - long + 1)]
        choices = [run for run in runs if set(run) <= set(free)]
        if len(choices) < (1 if self.contiguous else number):
            kind = " contiguous" if self.contiguous else ""
            raise TargetError(
                f"{label}: cannot remove {number}{kind} blocks: keep, targets and ignore protect all but {len(free)} "
                f"of {len(blocks)}; remove fewer, or protect fewer"
            )
        return choices

    def _spaced(self, number: int, free: Sequence[int], blocks: Sequence[Block], label: str) -> list[tuple[int, ...]]:
        """Return the blocks between the evenly spaced blocks that are kept."""
        kept_count = len(blocks) - number
        stay = {round(i * (len(blocks) - 1) / max(1, kept_count - 1)) for i in range(kept_count)}
        removed = [i for i in range(len(blocks)) if i not in stay]
        if stuck := sorted(set(removed) - set(free)):
            protected = f"by spacing removes block {stuck[0]}, which targets or ignore protect"
            raise TargetError(f"{label}: {protected}; choose by influence or loss")
        return [(i,) for i in removed]

    def _last(self, choices: Sequence[tuple[int, ...]], blocks: Sequence[Block], label: str) -> list[int]:
        """Return the last blocks that may be removed, for the shape of the result."""
        rounds = 1 if self.contiguous else self._number(blocks, label)
        return [i for run in choices[-rounds:] for i in run]

    def _chosen(self, model: PreTrainedModel, examples: Examples, run: Run, label: str) -> list[int]:
        """Return the blocks to remove, in order; the journal gets the score of each."""
        blocks = find_blocks(model)
        choices, removed = self._choices(blocks, label), []
        if self.by == "spacing":
            for (i,) in choices:
                run.journal.add("note", f"{label} {blocks[i].name}", "dropped", blocks=1)
            return [i for (i,) in choices]
        once = influences(model, blocks, examples, len(choices[0])) if self.by == "influence" else None
        for round_index in range(1 if self.contiguous else self._number(blocks, label)):
            costs = {}
            for i, candidate in enumerate(choices):
                if once is None:
                    run.journal.add(
                        "progress", label, f"loss without blocks {[*removed, *candidate]}", done=i, of=len(choices)
                    )
                    with skipping(blocks, [*removed, *candidate]):
                        costs[candidate] = mean_loss(model, examples, run.lm_objective)
                else:
                    costs[candidate] = float(once[candidate[0]])
            best = min(costs, key=lambda candidate: costs[candidate])
            choices.remove(best)
            removed += best
            figures = {self.by: round(costs[best], 6), "blocks": len(best), "turn": round_index + 1}
            run.journal.add("note", f"{label} {blocks[best[0]].name}", "dropped", **figures)
        return sorted(removed)


def _rest(blocks: Sequence[Block], removed: Sequence[int]) -> list[int]:
    return [block.index for block in blocks if block.index not in removed]


def influences(model: nn.Module, blocks: Sequence[Block], examples: Examples, run: int = 1) -> Float[Tensor, " starts"]:
    """For every run of `run` blocks, by its first: 1 - mean cos(x_in of the first, x_out of the last) over tokens.

    ShortGPT (Men 2024), eq. 1; for runs as in Gromov 2024 (https://arxiv.org/abs/2403.17887), eq. 6, without the arc.
    """
    total = torch.zeros(len(blocks) - run + 1, dtype=torch.float64)
    for example in examples:
        hidden_states = states(model, blocks, example)
        for i in range(len(total)):
            total[i] += float((1 - torch.cosine_similarity(hidden_states[i], hidden_states[i + run], dim=-1)).mean())
    return total / len(examples)


def _check_runs(model: PreTrainedModel, example: Batch, removed: Sequence[int], label: str) -> None:
    """Raise ModelError unless the smaller model runs with a cache: some need a block with attention for it."""
    try:
        with torch.no_grad():
            call_foreign(model, **example.to(device_of_model(model)).inputs)
    except CannotRun as error:
        raise ModelError(
            f"{label}: transformers cannot run the model without the blocks {sorted(removed)} ({one_line(error)}); "
            "protect them with keep"
        ) from error
