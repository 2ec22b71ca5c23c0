"""The training loss of a model: cross-entropy with the text, divergence from a teacher, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compress.errors import ModelError
from compress.models.kinds.objective import NEXT_TOKENS, LMObjective, Outputs
from compress.numerics.metrics import DivergenceName, distillation_loss, token_weights
from compress.train.teacher import Features, OnlineTeacher, Targets, Teacher


@dataclass(frozen=True)
class LanguageLoss:
    """The weighted sum of cross-entropy, divergence from a teacher, and differences of hidden states.

    (1 - ce_weight) * T^2 * divergence + ce_weight * cross-entropy + hidden * difference of hidden states
    + cosine * (1 - cosine of the last hidden states), each the mean over tokens.

    The cross-entropy is over the targets of `lm_objective`; the other terms are over all tokens. With masked tokens,
    where teacher and student read the same input, and hidden 0 this is the triple loss of Sanh 2019 (arXiv 1910.01108,
    section 3). Hidden states of an encoder and scores are no distributions; their relative squared difference
    (`relative`) replaces the divergence.

    teacher: required if ce_weight < 1; for hidden states an `OnlineTeacher`. token_scale: the temperature of
    `token_weights`, for the divergence. layer_map: pairs (student block, teacher block), counted from 0; None: evenly
    spaced.
    """

    ce_weight: float = 1.0
    divergence: DivergenceName = "forward_kl"
    temperature: float = 1.0
    teacher: Teacher | None = None
    token_scale: float | None = None
    hidden: float = 0.0
    cosine: float = 0.0
    layer_map: Sequence[tuple[int, int]] | None = None
    lm_objective: LMObjective = NEXT_TOKENS

    def __call__(self, model: nn.Module, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Float[Tensor, ""]:
        """The loss of some sequences; rows: their numbers."""
        needs_states = self.hidden > 0 or self.cosine > 0
        asked = {"output_hidden_states": True} if needs_states else {}
        found = self.lm_objective.read(model, ids, rows, **asked)
        loss = torch.zeros((), device=ids.device)
        targets: Targets | None = None
        if needs_states:
            assert isinstance(self.teacher, OnlineTeacher)
            targets, wanted = self.teacher.with_states(ids, rows)
            loss = loss + self._of_states(found.hidden_states, wanted)
        if self.ce_weight < 1:
            assert self.teacher is not None
            targets = self.teacher(ids, rows) if targets is None else targets
            loss = loss + (1 - self.ce_weight) * self._learned(found, targets)
        if self.ce_weight > 0:
            predicted, tokens = self.lm_objective.answers(found.logits, ids, rows)
            loss = loss + self.ce_weight * nn.functional.cross_entropy(predicted.float(), tokens)
        return loss

    def _learned(self, output: Any, targets: Targets) -> Tensor:
        """The difference of an output from the teacher's."""
        if isinstance(targets, Features):
            assert isinstance(self.lm_objective, Outputs)
            return relative(self.lm_objective.features(output), targets.values)
        logits, weights = self.lm_objective.predictions(output), None
        assert logits is not None
        if self.token_scale is not None:
            assert targets.text is not None
            weights = token_weights(targets.text, self.token_scale, logits.shape[0])
        return distillation_loss(self.divergence, logits.flatten(0, 1), targets, self.temperature, weights)

    def _of_states(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
        """The losses on hidden states; both sequences begin with the input of the first block."""
        blocks = len(found) - 1, len(wanted) - 1
        pairs = pairs_of_states((found[0].shape[-1], wanted[0].shape[-1]), blocks, self.layer_map)
        loss = torch.zeros((), device=found[0].device)
        if self.hidden > 0:
            each = [relative(found[own + 1], wanted[other + 1]) for own, other in pairs]
            loss = loss + self.hidden * torch.stack(each).mean()
        if self.cosine > 0:
            near = nn.functional.cosine_similarity(found[-1].float(), wanted[-1].float(), dim=-1)
            loss = loss + self.cosine * (1 - near).mean()
        return loss


def pairs_of_states(
    widths: tuple[int, int], blocks: tuple[int, int], layer_map: Sequence[tuple[int, int]] | None
) -> Sequence[tuple[int, int]]:
    """Pairs (block of the student, block of the teacher) whose hidden states are compared.

    widths, blocks: hidden channels and number of blocks of (student, teacher). Raises ModelError, without a prefix, if
    the hidden states cannot be compared.
    """
    if widths[0] != widths[1]:
        raise ModelError(
            f"teacher: its hidden states have {widths[1]} channels, the model's {widths[0]}; leave out hidden and "
            "cosine, or use a teacher of the model's width"
        )
    pairs = evenly(*blocks) if layer_map is None else layer_map
    beyond = [pair for pair in pairs if not all(0 <= i < n for i, n in zip(pair, blocks, strict=True))]
    if beyond:
        raise ModelError(
            f"layer_map: {list(beyond[0])} does not exist; the model has blocks 0 to {blocks[0] - 1}, the teacher 0 to "
            f"{blocks[1] - 1}"
        )
    return pairs


def evenly(student: int, teacher: int) -> list[tuple[int, int]]:
    """Map each of the student's blocks to a block of the teacher, evenly spaced, the last to the last."""
    return [(i, round((i + 1) * teacher / student) - 1) for i in range(student)]


def relative(actual: Float[Tensor, "*batch width"], expected: Float[Tensor, "*batch width"]) -> Float[Tensor, ""]:
    """The mean over tokens of |actual - expected|^2 / |expected|^2; tokens with huge states count like others."""
    expected = expected.float()
    return ((actual.float() - expected).square().sum(-1) / expected.square().sum(-1).clamp(min=1e-12)).mean()
