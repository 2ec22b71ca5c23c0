"""Dropping whole blocks: those whose output is nearly their input, or that are missed least (Men 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.api.context import Run
from compress.api.facts import Requirements
from compress.errors import ModelError, TargetError
from compress.families.reshaping import ReshapingPass
from compress.model.forward import logits_of, mean_loss, skipping, states
from compress.model.linear import linears
from compress.model.reshape.reconfigure import build, renumbered, replace_in_place, tensors, with_blocks
from compress.model.structure.blocks import Block, find_blocks
from compress.numerics.metrics import relative_error

SAME = 1e-2  # relative: the same sums give 0, half precision in another order 5e-3; a wrong block changes more


class DropBlocks(ReshapingPass):
    """Remove whole blocks, the least important first; what is left is a stock model with fewer of them.

    by influence: a block's (ShortGPT, eq. 1) is BI = 1 - E cos(x_in, x_out) over all calibration tokens, measured once.
    by loss: the block whose absence costs the least loss goes, then the next one in the model without it, and so on;
    it takes as many runs of the text as there are blocks, for each that goes. by spacing: the first block stays, the
    last, and others evenly between, as a student begins that is to be distilled (Sanh 2019, arXiv 1910.01108, section
    3). Blocks that targets and ignore leave out in part stay whole.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2403.03853"

    count: int | None = Field(default=None, ge=1, description="how many blocks to remove")
    sparsity: float | None = Field(default=None, gt=0, lt=1, description="instead: the share of all blocks to remove")
    by: Literal["influence", "loss", "spacing"] = Field(
        default="influence",
        description="influence: change of direction between input and output; loss: of the rest; spacing: evenly",
    )
    keep: tuple[int, ...] = Field(default=(), description="numbers of blocks that stay, from 0, or -1 for the last")
    contiguous: bool = Field(default=False, description="the blocks removed follow one another; judged as one")
    sequences: int | None = Field(default=None, ge=1, description="look at so many calibration sequences; null: all")

    def model_post_init(self, context: Any) -> None:
        if (self.count is None) == (self.sparsity is None):
            raise ValueError("give count or sparsity, one of the two, to say how many blocks are removed")
        if self.by == "spacing" and (self.keep or self.contiguous or self.sequences):
            raise ValueError("by: spacing says which blocks go; leave keep, contiguous and sequences out")

    @property
    def requires(self) -> Requirements:
        return replace(super().requires, objective=self.by == "loss")

    def outcome(self, model: PreTrainedModel, where: str) -> PretrainedConfig:
        """The configuration without as many blocks as will go: which ones is found on the calibration text."""
        blocks = find_blocks(model)
        return with_blocks(model, _rest(blocks, self._last(self._choices(blocks, where), blocks, where)))

    def apply(self, model: nn.Module, run: Run) -> None:
        assert isinstance(model, PreTrainedModel) and run.calibration is not None
        where, ids, blocks = run.label or self.key(), run.calibration[: self.sequences], find_blocks(model)
        gone = self._chosen(model, ids, run, where)
        kept = _rest(blocks, gone)
        with skipping(blocks, gone):
            wanted = logits_of(model, ids[:1])
        held = tensors(model)
        weights = {new: held[old] for old, new in renumbered(model, kept).items()}
        new = build(model, with_blocks(model, kept), weights)
        error = relative_error(logits_of(new, ids[:1]), wanted)
        if not error < SAME:
            raise ModelError(
                f"{where}: the model of {len(kept)} blocks is not the one that passes by the others (it differs by "
                f"{error:.2g}): what a block does depends on its number in a way that no configuration says"
            )
        replace_in_place(model, new)

    def _number(self, blocks: Sequence[Block], where: str) -> int:
        """How many blocks go."""
        found = self.count if self.sparsity is None else round(self.sparsity * len(blocks))
        assert found is not None
        if found == 0:
            raise TargetError(f"{where}: sparsity {self.sparsity:g} of {len(blocks)} blocks is none; ask for count: 1")
        if found >= len(blocks):
            raise TargetError(f"{where}: {found} of {len(blocks)} blocks would go; at most {len(blocks) - 1} can")
        return found

    def _choices(self, blocks: Sequence[Block], where: str) -> list[tuple[int, ...]]:
        """What goes at once: runs of contiguous blocks, of which one goes, or single blocks, of which several do."""
        number = self._number(blocks, where)
        if wrong := [i for i in self.keep if not -len(blocks) <= i < len(blocks)]:
            raise TargetError(f"{where}: keep names block {wrong[0]}, but the last one is {len(blocks) - 1}")
        kept = {i % len(blocks) for i in self.keep}
        whole = [b.index for b in blocks if all(self.takes(f"{b.name}.{name}") for name in linears(b.module))]
        free = [i for i in whole if i not in kept]
        if self.by == "spacing":
            return self._spaced(number, free, blocks, where)
        long = number if self.contiguous else 1
        runs = [tuple(range(i, i + long)) for i in range(len(blocks) - long + 1)]
        found = [run for run in runs if set(run) <= set(free)]
        if len(found) < (1 if self.contiguous else number):
            kind = " that follow one another" if self.contiguous else ""
            raise TargetError(
                f"{where}: {number} blocks{kind} are to go, but keep, targets and ignore leave {len(free)} of "
                f"{len(blocks)} to choose from; remove fewer, or protect fewer"
            )
        return found

    def _spaced(self, number: int, free: Sequence[int], blocks: Sequence[Block], where: str) -> list[tuple[int, ...]]:
        """The blocks between those that stay."""
        left = len(blocks) - number
        stay = {round(i * (len(blocks) - 1) / max(1, left - 1)) for i in range(left)}
        gone = [i for i in range(len(blocks)) if i not in stay]
        if stuck := sorted(set(gone) - set(free)):
            protected = f"by spacing block {stuck[0]} goes, which targets or ignore protect"
            raise TargetError(f"{where}: {protected}; choose by influence or loss")
        return [(i,) for i in gone]

    def _last(self, choices: Sequence[tuple[int, ...]], blocks: Sequence[Block], where: str) -> list[int]:
        """The last blocks that may go."""
        rounds = 1 if self.contiguous else self._number(blocks, where)
        return [i for run in choices[-rounds:] for i in run]

    def _chosen(self, model: PreTrainedModel, ids: Tensor, run: Run, where: str) -> list[int]:
        """The blocks to remove, in order; what each cost goes to the journal."""
        blocks = find_blocks(model)
        choices, gone = self._choices(blocks, where), []
        if self.by == "spacing":
            for (i,) in choices:
                run.journal.add("note", f"{where} {blocks[i].name}", "dropped", blocks=1)
            return [i for (i,) in choices]
        once = influences(model, blocks, ids, len(choices[0])) if self.by == "influence" else None
        for done in range(1 if self.contiguous else self._number(blocks, where)):
            costs = {}
            for i, some in enumerate(choices):
                if once is None:
                    run.journal.add("progress", where, f"loss without blocks {[*gone, *some]}", done=i, of=len(choices))
                    with skipping(blocks, [*gone, *some]):
                        costs[some] = mean_loss(model, ids, run.lm_objective)
                else:
                    costs[some] = float(once[some[0]])
            best = min(costs, key=lambda some: costs[some])
            choices.remove(best)
            gone += best
            figures = {self.by: round(costs[best], 6), "blocks": len(best), "turn": done + 1}
            run.journal.add("note", f"{where} {blocks[best[0]].name}", "dropped", **figures)
        return sorted(gone)


def _rest(blocks: Sequence[Block], gone: Sequence[int]) -> list[int]:
    return [block.index for block in blocks if block.index not in gone]


def influences(
    model: nn.Module, blocks: Sequence[Block], ids: Int[Tensor, "sequences length"], run: int = 1
) -> Float[Tensor, " starts"]:
    """For every run of so many blocks, by its first: 1 - mean cos(x_in of the first, x_out of the last) over tokens.

    ShortGPT (Men 2024), eq. 1; for runs as in Gromov 2024 (https://arxiv.org/abs/2403.17887), eq. 6, without the arc.
    """
    total = torch.zeros(len(blocks) - run + 1, dtype=torch.float64)
    for row in ids:
        found = states(model, blocks, row[None])
        for i in range(len(total)):
            total[i] += float((1 - torch.cosine_similarity(found[i], found[i + run], dim=-1)).mean())
    return total / len(ids)
