"""Channel permutation: reorder input channels to keep the most under N:M (Pool & Yu 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from compress.errors import TargetError
from compress.layers.linear import CompressedLinear, replace_linear
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.permutation import PermutationScheme
from compress.models.structure.links import Group
from compress.models.structure.permutations import Permutation, permute
from compress.numerics.sparse.masks import Pattern
from compress.numerics.sparse.permutation import search
from compress.numerics.sparse.scores import ria, wanda
from compress.passes.contract.facts import Effects, Fact, Log, Preparation, Requirements
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.observers import InputNorm
from compress.passes.contract.passes import BlockPass

Score = Literal["magnitude", "wanda", "ria"]
WILD = "*?[:"
"""Wildcards: a pattern without any of these is the name of one linear."""


class ChannelPermutation(BlockPass):
    """Reorder input channels so that a later N:M pruning pass keeps more important weights; remove nothing.

    Channels can be reordered if linears of the block write them and may write them in any order: feed-forward channels,
    and values inside a head. The rows of these linears are permuted in the same way, which costs nothing at run time.
    Each rewrite is verified in float32, and undone if it changes the block's output. Linears that read the same tensor
    share one permutation.
    """

    use_for: ClassVar[str] = (
        "N:M pruning, before wanda, magnitude or sparsegpt: the new order keeps weights with larger scores."
    )
    not_for: ClassVar[str] = "Unstructured pruning, where the order of channels does not matter."
    paper: ClassVar[str] = (
        "https://proceedings.neurips.cc/paper/2021/hash/6e8404c3b93a9527c8db241a1846599a-Abstract.html"
    )
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "cache_quantized"})

    pattern: Pattern = Field(default=Pattern("2:4"), description="N:M pattern of the later pruning pass")
    score: Score = Field(
        default="wanda",
        description="score to keep: magnitude (needs no data), wanda or ria; use that of the later pruning pass, or "
        "wanda for passes that compensate errors",
    )
    unlinked: Literal["keep", "skip", "refuse"] = Field(
        default="keep",
        description="linears whose input order is shared, such as that of the residual stream. 'keep': permute their "
        "inputs at run time (format native stores this; dense layers are stored in the original order: the same "
        "weights are kept, but N:M groups are not consecutive columns). 'skip': no permutation. 'refuse': error",
    )
    escapes: int = Field(default=2, ge=0, description="number of restarts of the search after no swap helps")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.pattern.n_of_m is None:
            raise ValueError(f"pattern {self.pattern.text} does not depend on the order; use N:M such as 2:4")

    @property
    def requires(self) -> Requirements:
        refuses = self.unlinked == "refuse" or (self.unlinked == "skip" and bool(self._named()))
        rehearsal = self.model_copy(update={"score": "magnitude", "escapes": 0}) if refuses else None
        return Requirements(data=self.score != "magnitude", rehearsal=rehearsal)

    def effects(self, layer: LayerScheme) -> Effects:
        transforms = (PermutationScheme(),) if self.unlinked == "keep" else ()
        return replace(
            super().effects(layer),
            transforms=transforms,
            prepares=Preparation("masked", self._mismatch, "reorders channels"),
        )

    def _mismatch(self, later: Effects) -> str | None:
        if any(sparsity.n_of_m == self.pattern.n_of_m for sparsity in later.sparsities):
            return None
        return f"it needs pattern {self.pattern.text}; write the same pattern in both passes"

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        statistics = inputs.observe(InputNorm) if self.requires.data else {}
        norms = {name: observer for group, observer in statistics.items() for name in group.linears}
        reason_of: dict[str, str] = {}  # the reason why readers are not folded
        folded: set[str] = set()
        for link in inputs.permutations:
            names = [name for name in link.readers if name in inputs.names]
            reason = self._fold(block, inputs, link, self._scores(block, names, norms, log), log)
            folded |= set() if reason else set(link.readers)
            reason_of |= dict.fromkeys(names, reason or "")
        for group in inputs.groups:
            names = [name for name in group.linears if name in inputs.names and name not in folded]
            if names:
                self._unlinked(block, inputs, names, reason_of.get(names[0]) or _reason(group), norms, log)

    def _scores(
        self, block: nn.Module, names: Sequence[str], norms: Mapping[str, InputNorm], log: Log
    ) -> Float[Tensor, "rows in"]:
        """Return the scores of all linears that share their input channels, as rows."""
        scores = []
        for name in names:
            weight, statistics = CompressedLinear.of(block.get_submodule(name)).weight.float(), norms.get(name)
            if statistics is not None and not statistics.tokens:
                log("fallback", f"{name}: no calibration token reached it, so magnitudes decide its order")
            if statistics is None or not statistics.tokens:
                scores.append(weight.abs())
            else:
                scores.append((wanda if self.score == "wanda" else ria)(weight, statistics.norm))
        return torch.cat(scores)

    def _search(self, score: Float[Tensor, "rows in"]) -> tuple[Int[Tensor, " in"], float, float]:
        """Return (order, kept score before, kept score after)."""
        n, m = self.pattern.n_of_m or (0, 1)
        return search(score, n, m, self.escapes)

    def _fold(
        self, block: nn.Module, inputs: BlockInputs, link: Permutation, score: Float[Tensor, "rows in"], log: Log
    ) -> str | None:
        """Permute the channels between sources and readers; return the reason if this is impossible, else None."""
        for name in link.sources:
            source = block.get_submodule(name)
            if isinstance(source, CompressedLinear) and source.quantized:
                return f"{name}, which writes its input, is quantized already"
        runs = link.runs(self.pattern.span)
        if runs is None:
            span = self.pattern.span
            return f"channels may be permuted only inside of heads, whose width is no multiple of {span} columns"
        order, score_before, score_after = torch.arange(len(link.parts)), 0.0, 0.0
        for slots, read in runs:
            permutation, *sums = self._search(torch.cat([score[:, columns.to(score.device)] for columns in read]))
            order[slots] = slots[permutation.cpu()]
            score_before, score_after = score_before + sums[0], score_after + sums[1]
        rewrite = permute(block, link, order, inputs.probe)
        reader_names, sources = ", ".join(link.readers), ", ".join(link.sources)
        if not rewrite.is_kept:
            reason = f"folding an order into {sources} would change the block's output, so it was undone"
            log("fallback", f"{reader_names}: {reason}", relative_error=rewrite.error)
            return reason
        _log_kept(log, f"{reader_names}: permuted, folded into {sources}", score, score_before, score_after)
        return None

    def _unlinked(
        self,
        block: nn.Module,
        inputs: BlockInputs,
        names: Sequence[str],
        reason: str,
        norms: Mapping[str, InputNorm],
        log: Log,
    ) -> None:
        """Handle linears of one input tensor whose channels keep their order."""
        reader_names = ", ".join(names)
        if self.unlinked == "keep":
            score = self._scores(block, names, norms, log)
            order, score_before, score_after = self._search(score)
            for name in names if score_after > score_before else ():
                replace_linear(block, name).permute_input(order)
            _log_kept(log, f"{reader_names}: permuted, at run time", score, score_before, score_after)
            return
        named = self._named()
        required = [name for name in names if self.unlinked == "refuse" or inputs.layer(name).name in named]
        if required:
            raise TargetError(
                f"{inputs.label}.{required[0]} cannot be permuted by folding: {reason}; use unlinked: keep, or leave "
                "it out (ignore)"
            )
        log("note", f"{reader_names}: not permuted: {reason}")

    def _named(self) -> set[str]:
        """Return the targets that are full names of linears."""
        return {target for target in self.targets if not set(WILD) & set(target)}


def _reason(group: Group) -> str:
    """Return the reason why the inputs of a group cannot be permuted by folding."""
    if group.norm is not None:
        return (
            f"its input comes from {group.norm} and so from the residual stream, whose channels all blocks read and "
            "write in one order"
        )
    return "no linear of the block writes its input channels in a permutable way"


def _log_kept(log: Log, message: str, score: Float[Tensor, "rows in"], score_before: float, score_after: float) -> None:
    """Journal the fractions of the total score that the pattern keeps."""
    total = max(float(score.sum(dtype=torch.float64)), 1e-30)
    log("note", message, kept_before=score_before / total, kept_after=score_after / total)
