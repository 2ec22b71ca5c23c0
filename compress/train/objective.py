"""The training loss of a model: cross-entropy with the text, divergence from a teacher, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.errors import ModelError
from compress.models.kinds.batch import IGNORED, Examples
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.contract import ModelKind
from compress.numerics.metrics import DivergenceName, distillation_loss, token_weights
from compress.train.teacher import Features, OnlineTeacher, Targets, Teacher


@dataclass(frozen=True)
class LanguageLoss:
    """The weighted sum of cross-entropy, divergence from a teacher, and differences of hidden states.

    (1 - ce_weight) * T^2 * divergence + ce_weight * cross-entropy + hidden * difference of hidden states + cosine * (1
    - cosine of the last hidden states), each the mean over tokens.

    The cross-entropy is over the targets of `lm_objective`; the other terms are over all tokens. With masked tokens,
    where teacher and student read the same input, and hidden 0, this is the triple loss of Sanh 2019 (arXiv 1910.01108,
    section 3). Hidden states of an encoder and scores are not distributions; their relative squared difference
    (`relative_error`) replaces the divergence.

    Attributes:
        ce_weight: weight of the cross-entropy.
        divergence: name of the divergence from the teacher.
        temperature: temperature T of the divergence.
        teacher: the teacher; required if ce_weight < 1, and an `OnlineTeacher` for hidden states.
        token_scale: temperature of `token_weights` of the divergence, or None.
        hidden: weight of the differences of hidden states.
        cosine: weight of the cosine term.
        layer_map: pairs (student block, teacher block), counted from 0; None for evenly spaced pairs.
        lm_objective: inputs and targets of the text.
    """

    ce_weight: float = 1.0
    divergence: DivergenceName = "forward_kl"
    temperature: float = 1.0
    teacher: Teacher | None = None
    token_scale: float | None = None
    hidden: float = 0.0
    cosine: float = 0.0
    layer_map: Sequence[tuple[int, int]] | None = None
    lm_objective: ModelKind = CAUSAL

    def counts(self, examples: Examples, rows: Sequence[int]) -> tuple[int, int]:
        """Return the items that (the terms of the teacher, the cross-entropy) are means over.

        Args:
            examples: the sequences.
            rows: indices of the sequences.
        """
        by_token = self.token_scale is None and self.lm_objective.per_token and self.lm_objective.compared != "spans"
        items = sum(example.places for example in examples) if by_token else len(examples)
        if not self.ce_weight:
            return items, 0
        return items, int((self.lm_objective.targets(examples, rows) != IGNORED).sum())

    def __call__(
        self, model: nn.Module, examples: Examples, rows: Sequence[int], weights: Sequence[float] = (1.0, 1.0)
    ) -> Float[Tensor, ""]:
        """Compute the loss of some sequences.

        Args:
            model: the model in training.
            examples: the sequences.
            rows: indices of the sequences.
            weights: factors of (the terms of the teacher, the cross-entropy).
        """
        teacher_weight, text_weight = weights
        needs_states = self.hidden > 0 or self.cosine > 0
        options = {"output_hidden_states": True} if needs_states else {}
        output = self.lm_objective.read(model, examples, rows, **options)
        loss = torch.zeros((), device=next(model.parameters()).device)
        targets: Targets | None = None
        if needs_states:
            assert isinstance(self.teacher, OnlineTeacher)
            targets, teacher_states = self.teacher.with_states(examples, rows)
            loss = loss + teacher_weight * self._state_loss(output.hidden_states, teacher_states)
        if self.ce_weight < 1:
            assert self.teacher is not None
            targets = self.teacher(examples, rows) if targets is None else targets
            loss = loss + (1 - self.ce_weight) * teacher_weight * self._distillation_loss(output, targets, examples)
        if self.ce_weight > 0:
            predicted, tokens = self.lm_objective.answers(output.logits, examples, rows)
            loss = loss + self.ce_weight * text_weight * nn.functional.cross_entropy(predicted.float(), tokens)
        return loss

    def _distillation_loss(self, output: Any, targets: Targets, examples: Examples) -> Tensor:
        """Compute the difference of an output from the teacher's."""
        if isinstance(targets, Features):
            return relative_error(self.lm_objective.values(output), targets.values)
        logits, weights = self.lm_objective.predictions(output), None
        assert logits is not None
        if self.token_scale is not None:
            assert targets.text is not None
            lengths = [example.places for example in examples]
            weights = token_weights(targets.text, self.token_scale, lengths)
        return distillation_loss(self.divergence, logits.flatten(0, 1), targets, self.temperature, weights)

    def _state_loss(self, states: Sequence[Tensor], teacher_states: Sequence[Tensor]) -> Tensor:
        """Compute the losses on hidden states; both sequences begin with the input of the first block."""
        blocks = len(states) - 1, len(teacher_states) - 1
        pairs = state_pairs((states[0].shape[-1], teacher_states[0].shape[-1]), blocks, self.layer_map)
        loss = torch.zeros((), device=states[0].device)
        if self.hidden > 0:
            differences = [
                relative_error(states[block + 1], teacher_states[teacher_block + 1]) for block, teacher_block in pairs
            ]
            loss = loss + self.hidden * torch.stack(differences).mean()
        if self.cosine > 0:
            similarity = nn.functional.cosine_similarity(states[-1].float(), teacher_states[-1].float(), dim=-1)
            loss = loss + self.cosine * (1 - similarity).mean()
        return loss


def state_pairs(
    widths: tuple[int, int], blocks: tuple[int, int], layer_map: Sequence[tuple[int, int]] | None
) -> Sequence[tuple[int, int]]:
    """Return pairs (block of the student, block of the teacher) whose hidden states are compared.

    Args:
        widths: hidden channels of (student, teacher).
        blocks: number of blocks of (student, teacher).
        layer_map: pairs of blocks; None for evenly spaced pairs.

    Raises:
        ModelError: without a prefix, for hidden states that cannot be compared.
    """
    if widths[0] != widths[1]:
        raise ModelError(
            f"teacher: its hidden states have {widths[1]} channels, the model's {widths[0]}; leave out hidden and "
            "cosine, or use a teacher of the model's width"
        )
    pairs = evenly_spaced_pairs(*blocks) if layer_map is None else layer_map
    absent = [pair for pair in pairs if not all(0 <= i < n for i, n in zip(pair, blocks, strict=True))]
    if absent:
        raise ModelError(
            f"layer_map: {list(absent[0])} does not exist; the model has blocks 0 to {blocks[0] - 1}, the teacher 0 to "
            f"{blocks[1] - 1}"
        )
    return pairs


def evenly_spaced_pairs(student: int, teacher: int) -> list[tuple[int, int]]:
    """Map each block of the student to a block of the teacher, evenly spaced, the last block to the last."""
    return [(i, round((i + 1) * teacher / student) - 1) for i in range(student)]


def relative_error(actual: Float[Tensor, "*batch width"], expected: Float[Tensor, "*batch width"]) -> Float[Tensor, ""]:
    """Return the mean over tokens of |actual - expected|^2 / |expected|^2.

    Every token has the same weight, also tokens with huge hidden states.
    """
    expected = expected.float()
    return ((actual.float() - expected).square().sum(-1) / expected.square().sum(-1).clamp(min=1e-12)).mean()
