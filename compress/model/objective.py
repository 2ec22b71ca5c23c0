"""What a language model is asked for on a text: the token behind each place, or tokens that are masked out of it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CalibrationError, ModelError

IGNORED = -100
"""Stands where no token is asked for; what torch's losses know by default."""

MASKED_SHARE = 0.15  # Devlin 2019, section 3.1; the two below, too: of the tokens that are asked for
SHOWN_AS_MASK = 0.8
SHOWN_AS_RANDOM = 0.1


class LMObjective(Protocol):
    """How a text becomes questions to a model; ids are [rows, length], rows their numbers among all of their text."""

    of: ClassVar[str]
    """What is asked for, as reports have it."""

    def read(self, model: nn.Module, ids: Tensor, rows: Sequence[int], **asked: Any) -> Any:
        """The output of the model for what it is shown of these sequences; asked: further arguments of the model."""
        ...

    def targets(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Int[Tensor, "rows length"]:
        """The token that the logits of each place are to give, IGNORED where they are not asked."""
        ...

    def answers(
        self, logits: Float[Tensor, "rows length vocabulary"], ids: Int[Tensor, "rows length"], rows: Sequence[int]
    ) -> tuple[Float[Tensor, "targets vocabulary"], Int[Tensor, " targets"]]:
        """The logits of the places that are asked, and the tokens that they are to give."""
        ...


@dataclass(frozen=True)
class NextTokens:
    """Causal language modelling: each token from those before it; the first of a sequence is not asked for."""

    of: ClassVar[str] = "next tokens"

    def read(self, model: nn.Module, ids: Tensor, rows: Sequence[int], **asked: Any) -> Any:
        """Raises ModelError for a model that sees the tokens that it would be asked for."""
        if is_masked(type(model), getattr(model, "config", None)):
            raise ModelError(f"model: {type(model).__name__} predicts masked tokens, not next ones; use prediction_of")
        return model(input_ids=ids, **without_cache(model), **asked)

    def targets(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Int[Tensor, "rows length"]:
        found = ids.roll(-1, 1)
        found[:, -1] = IGNORED
        return found

    def answers(self, logits: Tensor, ids: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        return logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()


NEXT_TOKENS = NextTokens()


@dataclass(frozen=True)
class MaskedTokens:
    """Masked language modelling (Devlin 2019, arXiv 1810.04805, section 3.1).

    A share of the tokens of each sequence is asked for, at least one, none of the special ones; 80% of these are shown
    as the mask, 10% as a random token, 10% as they are. What is drawn depends on the seed and on the number of the
    sequence alone: a sequence has the same masks in every epoch, in every process and for every model that reads it.

    mask: its token id. vocabulary: random tokens are below. special: token ids.
    """

    of: ClassVar[str] = "masked tokens"

    mask: int
    vocabulary: int
    special: tuple[int, ...] = ()
    probability: float = MASKED_SHARE
    seed: int = 0

    def read(self, model: nn.Module, ids: Tensor, rows: Sequence[int], **asked: Any) -> Any:
        return model(input_ids=self.draw(ids, rows)[0], **asked)

    def targets(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Int[Tensor, "rows length"]:
        return self.draw(ids, rows)[1]

    def answers(self, logits: Tensor, ids: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        targets = self.targets(ids, rows)
        asked = targets != IGNORED
        return logits[asked], targets[asked]

    def draw(
        self, ids: Int[Tensor, "rows length"], rows: Sequence[int]
    ) -> tuple[Int[Tensor, "rows length"], Int[Tensor, "rows length"]]:
        """(what is shown, targets). Raises CalibrationError for a sequence of special tokens alone."""
        shown, targets = ids.cpu().clone(), torch.full(ids.shape, IGNORED)
        special = torch.tensor(self.special, dtype=ids.dtype)
        for row, inputs, wanted in zip(rows, shown, targets, strict=True):
            places = torch.isin(inputs, special, invert=True).nonzero()[:, 0]
            if not len(places):
                raise CalibrationError(f"sequence {row} holds special tokens alone, none of which can be masked")
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {row}".encode()))
            count = max(1, round(self.probability * len(places)))
            at = places[torch.randperm(len(places), generator=generator)[:count]]
            tokens = wanted[at] = inputs[at]
            chance = torch.rand(count, generator=generator)
            drawn = torch.randint(self.vocabulary, (count,), generator=generator)
            drawn = torch.where(chance < SHOWN_AS_MASK + SHOWN_AS_RANDOM, drawn, tokens)
            inputs[at] = torch.where(chance < SHOWN_AS_MASK, self.mask, drawn)
        return shown.to(ids.device), targets.to(ids.device)


def is_masked(kind: type, config: PretrainedConfig | None) -> bool:
    """Whether a class of models predicts masked tokens, as transformers has it, and not next ones."""
    autos: tuple[Any, Any] = transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM
    masked, causal = (issubclass(kind, auto._model_mapping.get(type(config), ())) for auto in autos)
    return masked and not causal and not getattr(config, "is_encoder_decoder", False)


def objective_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, seed: int = 0) -> LMObjective:
    """What a model is asked for; seed: of masks.

    Raises ModelError for a model that predicts masked tokens and a tokenizer that does not say which token the mask is.
    """
    if not is_masked(type(model), model.config):
        return NEXT_TOKENS
    size = model.get_input_embeddings().get_parameter("weight").shape[0]
    mask: Any = None if tokenizer is None else tokenizer.mask_token_id
    if tokenizer is not None and mask is not None and mask < size:
        return MaskedTokens(mask, min(size, len(tokenizer)), special_ids(tokenizer), seed=seed)
    lack = "it has no tokenizer" if tokenizer is None else "its tokenizer has no mask token"
    if mask is not None:
        lack = f"the mask token of its tokenizer is {mask}, beyond the {size} tokens that the model knows"
    raise ModelError(
        f"model: {type(model).__name__} predicts masked tokens, but {lack}; save a tokenizer with a mask token beside "
        "the model (tokenizer.save_pretrained), or give one to compress.apply (tokenizer=)"
    )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids of a tokenizer's special tokens, in order."""
    added = {token for token, known in tokenizer.added_tokens_decoder.items() if known.special}
    return tuple(sorted(added | set(tokenizer.all_special_ids)))


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The argument that keeps a model from caching; none for a model whose configuration knows of no cache."""
    config = getattr(model, "config", None)
    return {"use_cache": False} if config is None or hasattr(config, "use_cache") else {}
