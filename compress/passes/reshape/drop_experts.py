"""Fewer experts: drop those that add least to the output of their block, with their rows of the router (Lasby 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import CannotRun, ModelError, NumericError, TargetError, call_foreign, one_line
from compress.layers.linear import linears
from compress.models.experts import ROUTED, Experts, roles
from compress.models.forward import logits_of
from compress.models.kinds.batch import Examples
from compress.models.reshape.experts import (
    FewerExperts,
    expert_sets,
    experts_per_token,
    fewer_experts,
    group_numbers,
    highest,
    proved_groups,
    release_dropped,
)
from compress.models.reshape.reconfigure import build, replace_in_place
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Requirements
from compress.passes.contract.memory import ProblemSize
from compress.passes.families.reshaping import ReshapingPass

FEWEST = 2  # a set of one expert is a feed-forward layer, which models state in another way


class DropExperts(ReshapingPass):
    """Remove experts of a mixture, the least important of each block first; the result is a stock model.

    `by` ranks the experts:

    - reap: the mean of g_j(x) ||f_j(x)||_2 over the tokens that are routed to expert j, its router weight times the
      norm of its output (REAP, eq. 9).
    - frequency: the number of its tokens.
    - activation: the sum of ||f_j(x)||_2 over its tokens (EAN, Jaiswal 2025, arXiv 2504.05586).

    All blocks lose the same number of experts, because a configuration has one number. If a router chooses groups of
    experts first, all groups lose the same number. Each token is routed to as many experts as before. If the weights of
    a router sum to 1 over the chosen experts, tokens without a dropped expert get the same output as before.

    The rows of a router are assigned to experts by a permutation that must leave the output unchanged.
    """

    use_for: ClassVar[str] = (
        "Mixtures of experts that take too much memory: the result is a stock model for every program that runs the "
        "original. Quantize it afterwards."
    )
    not_for: ClassVar[str] = (
        "Fewer operations per token: a token is still computed by as many experts. Text other than that of the "
        "intended use, because experts for other text are dropped. Families whose checkpoints have no names for "
        "single experts, whose results only compress loads."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2510.13999"

    count: int | None = Field(default=None, ge=1, description="number of experts to remove from each block")
    sparsity: float | None = Field(
        default=None, gt=0, lt=1, description="instead of count: fraction of the experts of each block to remove"
    )
    by: Literal["reap", "frequency", "activation"] = Field(
        default="reap",
        description="reap: mean of router weight times output norm; frequency: number of tokens; activation: sum of "
        "output norms",
    )
    sequences: int | None = Field(default=None, ge=1, description="number of calibration sequences to use; null: all")

    def model_post_init(self, context: Any) -> None:
        if (self.count is None) == (self.sparsity is None):
            raise ValueError("give exactly one of count and sparsity")

    @property
    def requires(self) -> Requirements:
        return replace(super().requires, experts=True)

    def memory(self, size: ProblemSize) -> int:
        """Return the forward pass of a sequence with its logits, or a copy of the experts of one block."""
        forward = size.forward_bytes + (size.itemsize + 4) * size.length * size.vocabulary
        blocks = max(1, size.outputs // max(1, size.hidden))
        return max(forward, size.itemsize * size.weights // blocks)

    def outcome(self, model: PreTrainedModel, label: str) -> PretrainedConfig:
        """Return the configuration with fewer experts; the calibration text decides later which ones are removed."""
        return self._fewer(model, label).config

    @torch.no_grad()
    def apply(self, model: nn.Module, run: Run) -> None:
        assert isinstance(model, PreTrainedModel) and run.calibration is not None
        label, examples = run.label or self.key(), run.calibration[: self.sequences]
        fewer = self._fewer(model, label)
        measured = routed_outputs(model, examples)
        for name, statistics in measured.items():
            _check_enough(statistics.per_token, fewer.count, fewer.kept, label)
            if not bool(torch.isfinite(statistics.scores(self.by)).all()):
                raise NumericError(f"{label} {name}: the output of an expert holds NaN or infinity on the text")
        groups = proved_groups(model, fewer, examples[0], label)
        if fewer.kept % groups:
            raise _not_divided(fewer, groups, label)
        numbers: dict[str, list[int]] = {}
        for name, statistics in measured.items():
            scores = statistics.scores(self.by)
            numbers[name] = highest(scores, fewer.kept, groups).tolist()
            kept_share = float(scores[numbers[name]].sum() / scores.sum().clamp(min=torch.finfo(scores.dtype).tiny))
            run.journal.add(
                "note",
                f"{label} {name}",
                "dropped experts",
                experts=[number for number in range(fewer.count) if number not in numbers[name]],
                kept_score=round(kept_share, 6),
                without_tokens=int((statistics.tokens == 0).sum()),
            )
        new = build(model, fewer.config, fewer.taken(model, numbers, numbers))
        try:
            call_foreign(logits_of, new, examples[0])
        except CannotRun as error:
            raise _cannot_run(fewer, error, label) from error
        replace_in_place(model, new)
        del new
        release_dropped(model)

    def _fewer(self, model: PreTrainedModel, label: str) -> FewerExperts:
        """Return the shape of the result; the model may be on the meta device."""
        sets = expert_sets(model)
        counts = sorted({experts.count for experts in sets.values()})
        if not sets:
            raise TargetError(
                f"{label}: no block of this model has experts of the known form: two matrices for each expert, and a "
                "call with tokens, expert numbers and weights; leave this pass out"
            )
        if len(counts) > 1:
            raise TargetError(
                f"{label}: the blocks of this model have {' and '.join(map(str, counts))} experts; its configuration "
                "cannot set one number for all; leave this pass out"
            )
        names = [f"{name}.{linear}" for name, experts in sets.items() for linear in linears(experts)]
        why = "the number of experts is uniform in a configuration: all blocks lose as many, or none"
        self.check_all_taken(names, label, why)
        remaining = counts[0] - self._number(counts[0], label)
        try:
            per_token = experts_per_token(model)
        except CannotRun:
            return fewer_experts(model, remaining)  # only the calibration text shows how many experts compute a token
        _check_enough(per_token, counts[0], remaining, label)
        fewer = fewer_experts(model, remaining)
        try:
            experts_per_token(fewer.sketch)
        except CannotRun as error:
            for groups in group_numbers(model.config, fewer.count):
                if fewer.kept % groups:
                    raise _not_divided(fewer, groups, label) from error
            raise _cannot_run(fewer, error, label) from error
        return fewer

    def _number(self, experts: int, label: str) -> int:
        """Return the number of experts to remove from each block."""
        number = self.count if self.sparsity is None else round(self.sparsity * experts)
        assert number is not None
        if number == 0:
            raise TargetError(f"{label}: sparsity {self.sparsity:g} of {experts} experts removes none; use count: 1")
        if number > experts - FEWEST:
            most = f"a mixture has at least {FEWEST}; use at most {experts - FEWEST}"
            raise TargetError(f"{label}: cannot remove {number} of {experts} experts: {most}")
        return number


def _check_enough(per_token: int, count: int, remaining: int, label: str) -> None:
    """Raise TargetError if fewer experts are left than compute a token."""
    if per_token > remaining:
        raise TargetError(
            f"{label}: {remaining} of {count} experts are left, but each token is computed by {per_token}; "
            f"remove at most {count - per_token}"
        )


def _not_divided(fewer: FewerExperts, groups: int, label: str) -> TargetError:
    divisible = max(groups, fewer.kept // groups * groups)
    return TargetError(
        f"{label}: the router chooses among {groups} groups of experts, which must have the same size, but "
        f"{fewer.kept} experts are left; keep a multiple of {groups}, such as count: {fewer.count - divisible}"
    )


def _cannot_run(fewer: FewerExperts, error: Exception, label: str) -> ModelError:
    return ModelError(
        f"{label}: transformers cannot run the model with {fewer.kept} of {fewer.count} experts ({one_line(error)}); "
        "remove fewer"
    )


@dataclass
class RoutedOutputs:
    """Sums over the tokens that a router gives to each expert of a set.

    Attributes:
        tokens: number of tokens.
        norms: sum of ||f_j(x)||_2.
        weighted_norms: sum of g_j(x) ||f_j(x)||_2.
        per_token: experts that compute a token.
    """

    tokens: Float[Tensor, " experts"]
    norms: Float[Tensor, " experts"]
    weighted_norms: Float[Tensor, " experts"]
    per_token: int = 0

    @classmethod
    def none(cls, experts: int) -> RoutedOutputs:
        """Return the sums over no tokens."""
        tokens, norms, weighted_norms = torch.zeros(3, experts, dtype=torch.float64)
        return cls(tokens, norms, weighted_norms)

    def scores(self, by: str) -> Float[Tensor, " experts"]:
        """Return the importance of each expert; experts without tokens have none."""
        # S_j = 1 / |X_j| sum over x in X_j of g_j(x) ||f_j(x)||_2
        reap = self.weighted_norms / self.tokens.clamp(min=1)
        return {"reap": reap, "frequency": self.tokens, "activation": self.norms}[by]


def routed_outputs(model: nn.Module, examples: Examples) -> Mapping[str, RoutedOutputs]:
    """Measure the outputs of all experts on the tokens that are routed to them, by the name of their set."""
    measured: dict[str, RoutedOutputs] = {}
    with ExitStack() as stack:
        for name, experts in expert_sets(model).items():
            measured[name] = RoutedOutputs.none(experts.count)
            _observe(experts, measured[name], stack)
        for example in examples:
            logits_of(model, example)
    return measured


def _observe(experts: Experts, sums: RoutedOutputs, stack: ExitStack) -> None:
    """Add the calls of the experts of a set to the sums, until the stack is closed."""
    routes: list[tuple[Tensor, Tensor]] = []

    def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        _, chosen, weights = roles((*args, *kwargs.values()))
        routes[:] = [(chosen, weights)]
        sums.per_token = max(sums.per_token, chosen.shape[-1])

    def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor, number: int) -> None:
        (chosen, weights), token = routes[0], ROUTED.get()
        norms = torch.linalg.vector_norm(output.float(), dim=-1).double()
        gates = torch.where(chosen[token] == number, weights[token], 0).double().sum(-1)
        sums.tokens[number] += len(norms)
        sums.norms[number] += float(norms.sum())
        sums.weighted_norms[number] += float((gates * norms).sum())

    stack.callback(experts.register_forward_pre_hook(before, with_kwargs=True).remove)
    for number in range(experts.count):
        stack.callback(experts.expert(number).register_forward_hook(partial(after, number=number)).remove)
