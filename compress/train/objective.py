"""What a language model learns from: the text itself, a teacher, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compress.errors import ModelError
from compress.model.objective import NEXT_TOKENS, LMObjective
from compress.numerics.metrics import DivergenceName, SoftTargets, distillation_loss, token_weights
from compress.train.teacher import OnlineTeacher, Teacher


@dataclass(frozen=True)
class LanguageLoss:
    """(1 - ce_weight) * T^2 * divergence from the teacher + ce_weight * cross-entropy with the text
    + hidden * difference of hidden states + cosine * (1 - cosine of the last hidden states), each the mean over tokens.

    The cross-entropy is that of the tokens that `prediction` asks for, the others are of all. With masked tokens, which
    teacher and student see alike, and hidden 0 this is the triple loss of Sanh 2019 (arXiv 1910.01108, section 3).

    teacher: needed where ce_weight < 1; for hidden states one that is asked in every step. token_scale: of
    `token_weights`, for the divergence. layer_map: pairs of a block of the student and one of the teacher,
    counted from 0; None: evenly.
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
        """The loss of some sequences; rows: their numbers among all."""
        looks = self.hidden > 0 or self.cosine > 0
        asked = {"output_hidden_states": True} if looks else {}
        found = self.lm_objective.read(model, ids, rows, **asked)
        logits: Tensor = found.logits
        loss = torch.zeros((), device=logits.device)
        targets: SoftTargets | None = None
        if looks:
            assert isinstance(self.teacher, OnlineTeacher)
            targets, wanted = self.teacher.with_states(ids, rows)
            loss = loss + self._of_states(found.hidden_states, wanted)
        if self.ce_weight < 1:
            assert self.teacher is not None
            targets = self.teacher(ids, rows) if targets is None else targets
            loss = loss + (1 - self.ce_weight) * self._soft(logits.flatten(0, 1), targets)
        if self.ce_weight > 0:
            predicted, tokens = self.lm_objective.answers(logits, ids, rows)
            loss = loss + self.ce_weight * nn.functional.cross_entropy(predicted.float(), tokens)
        return loss

    def _soft(self, logits: Float[Tensor, "tokens vocabulary"], targets: SoftTargets) -> Tensor:
        weights = None
        if self.token_scale is not None:
            assert targets.text is not None
            weights = token_weights(targets.text, self.token_scale)
        return distillation_loss(self.divergence, logits, targets, self.temperature, weights)

    def _of_states(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
        """The losses on hidden states; both hold those before the first block, too."""
        widths = found[0].shape[-1], wanted[0].shape[-1]
        if widths[0] != widths[1]:
            raise ModelError(
                f"teacher: its hidden states have {widths[1]} channels, the model's {widths[0]}; leave hidden and "
                "cosine out"
            )
        blocks = len(found) - 1, len(wanted) - 1
        pairs = evenly(*blocks) if self.layer_map is None else self.layer_map
        beyond = [pair for pair in pairs if not all(0 <= i < n for i, n in zip(pair, blocks, strict=True))]
        if beyond:
            raise ModelError(f"layer_map: no blocks {beyond[0]}; the model has {blocks[0]}, its teacher {blocks[1]}")
        loss = torch.zeros((), device=found[0].device)
        if self.hidden > 0:
            each = [relative(found[mine + 1], wanted[theirs + 1]) for mine, theirs in pairs]
            loss = loss + self.hidden * torch.stack(each).mean()
        if self.cosine > 0:
            near = nn.functional.cosine_similarity(found[-1].float(), wanted[-1].float(), dim=-1)
            loss = loss + self.cosine * (1 - near).mean()
        return loss


def evenly(mine: int, theirs: int) -> list[tuple[int, int]]:
    """The last of every few of the teacher's blocks for each of the student's."""
    return [(i, round((i + 1) * theirs / mine) - 1) for i in range(mine)]


def relative(found: Float[Tensor, "*batch width"], wanted: Float[Tensor, "*batch width"]) -> Float[Tensor, ""]:
    """The mean over tokens of |found - wanted|^2 / |wanted|^2; tokens of huge states count no more than others."""
    wanted = wanted.float()
    return ((found.float() - wanted).square().sum(-1) / wanted.square().sum(-1).clamp(min=1e-12)).mean()
