"""What a language model learns from: the text itself, a teacher, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compress.numerics.divergences import DivergenceName, distillation_loss
from compress.train.teacher import Teacher


@dataclass(frozen=True)
class LanguageLoss:
    """(1 - hard) * T^2 * divergence from the teacher + hard * cross-entropy with the text, the mean over tokens.

    teacher: needed where hard < 1.
    """

    hard: float = 1.0
    divergence: DivergenceName = "forward_kl"
    temperature: float = 1.0
    teacher: Teacher | None = None

    def __call__(self, model: nn.Module, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Float[Tensor, ""]:
        """The loss of some sequences; rows: their numbers among all."""
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        loss = torch.zeros((), device=logits.device)
        if self.hard < 1:
            assert self.teacher is not None
            targets = self.teacher(ids, rows)
            soft = distillation_loss(self.divergence, logits.flatten(0, 1), targets, self.temperature)
            loss = loss + (1 - self.hard) * soft
        if self.hard > 0:
            predicted = logits[:, :-1].float().flatten(0, 1)
            loss = loss + self.hard * nn.functional.cross_entropy(predicted, ids[:, 1:].flatten())
        return loss
