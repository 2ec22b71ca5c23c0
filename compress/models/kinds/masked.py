"""Masked language models: predict masked tokens from all others."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CalibrationError, ModelError
from compress.models.kinds.batch import IDS, IGNORED, Batch, Examples
from compress.models.kinds.contract import ModelKind, is_masked
from compress.models.structure.ends import vocabulary_size

MASKED_SHARE = 0.15  # Devlin 2019, section 3.1: the fraction of masked tokens; below: fractions of the masked tokens
SHOWN_AS_MASK = 0.8
SHOWN_AS_RANDOM = 0.1


@dataclass(frozen=True)
class MaskedLM(ModelKind):
    """Models of masked tokens (Devlin 2019, arXiv 1810.04805, section 3.1).

    A fraction of the tokens of each sequence are targets, at least one; special tokens never are. The input has the
    mask token at 80% of the targets, a random token at 10%, and the original token at 10%. The random choices depend
    only on the seed and the number of the sequence: a sequence has the same masks in every epoch, in every process and
    for every model. Calibration reads the tokens without masks.

    Attributes:
        mask: id of the mask token.
        vocabulary: random tokens have smaller ids.
        special: ids of special tokens.
        probability: fraction of masked tokens.
        seed: of the masks.
    """

    name: ClassVar[str] = "predicts masked tokens"
    auto: ClassVar[str] = "AutoModelForMaskedLM"
    task: ClassVar[str] = "fill-mask"
    predicts: ClassVar[str] = "masked tokens"
    masks: ClassVar[bool] = True

    mask: int = -1
    vocabulary: int = 0
    special: tuple[int, ...] = ()
    probability: float = MASKED_SHARE
    seed: int = 0

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, PreTrainedModel) and is_masked(type(model), getattr(model, "config", None))

    def bound(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, seed: int) -> ModelKind:
        size = vocabulary_size(model)
        mask: Any = None if tokenizer is None else tokenizer.mask_token_id
        if tokenizer is not None and mask is not None and mask < size:
            return MaskedLM(mask, min(size, len(tokenizer)), special_ids(tokenizer), seed=seed)
        lack = "it has no tokenizer" if tokenizer is None else "its tokenizer has no mask token"
        if mask is not None:
            lack = f"the mask token of its tokenizer is {mask}, outside the model's vocabulary of {size} tokens"
        raise ModelError(
            f"model: {type(model).__name__} predicts masked tokens, but {lack}; save a tokenizer with a mask token in "
            "the model's folder (tokenizer.save_pretrained), or pass one to compress.apply (tokenizer=)"
        )

    def with_masks(self, seed: int, probability: float | None) -> ModelKind:
        return replace(self, seed=seed, probability=probability or MASKED_SHARE)

    def shown(self, examples: Examples, rows: Sequence[int]) -> Examples:
        """Mask tokens. Raises CalibrationError for a sequence of special tokens only."""
        return Examples(tuple(self._masked(example, row) for example, row in zip(examples, rows, strict=True)))

    def _masked(self, example: Batch, row: int) -> Batch:
        ids = example.inputs[IDS]
        inputs, labels = ids[0].cpu().clone(), torch.full((ids.shape[1],), IGNORED)
        places = torch.isin(inputs, torch.tensor(self.special, dtype=ids.dtype), invert=True).nonzero()[:, 0]
        if not len(places):
            raise CalibrationError(
                f"sequence {row} holds only special tokens, which cannot be masked; use a text with other tokens"
            )
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {row}".encode()))
        count = max(1, round(self.probability * len(places)))
        at = places[torch.randperm(len(places), generator=generator)[:count]]
        tokens = labels[at] = inputs[at]
        chance = torch.rand(count, generator=generator)
        drawn = torch.randint(self.vocabulary, (count,), generator=generator)
        drawn = torch.where(chance < SHOWN_AS_MASK + SHOWN_AS_RANDOM, drawn, tokens)
        inputs[at] = torch.where(chance < SHOWN_AS_MASK, self.mask, drawn)
        return Batch({**example.inputs, IDS: inputs[None].to(ids.device)}, labels[None].to(ids.device))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of a tokenizer's special tokens, in order."""
    added = {token for token, added_token in tokenizer.added_tokens_decoder.items() if added_token.special}
    return tuple(sorted(added | set(tokenizer.all_special_ids)))
