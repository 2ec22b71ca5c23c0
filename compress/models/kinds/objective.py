"""The objectives on a text: predict next, masked or target tokens, or those of a transcript, or none at all."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import Seq2SeqLMOutput, SequenceClassifierOutput

from compress.errors import CalibrationError, ModelError, RecipeError
from compress.models.kinds.inputs import inputs_of, source_and_target
from compress.models.kinds.kinds import (
    CAUSAL,
    DISTRIBUTIONS,
    HEADLESS,
    PAIRED,
    RECORDED,
    Compared,
    answer_of,
    described,
    is_masked,
    kind_of,
)
from compress.models.kinds.recordings import IGNORED as IGNORED
from compress.models.kinds.recordings import by_shape, targets_in
from compress.models.structure.ends import vocabulary_size

MASKED_SHARE = 0.15  # Devlin 2019, section 3.1: the fraction of masked tokens; below: fractions of the masked tokens
SHOWN_AS_MASK = 0.8
SHOWN_AS_RANDOM = 0.1


class LMObjective(Protocol):
    """How a text becomes inputs and targets of a model; ids: [rows, length]; rows: the numbers of the sequences."""

    of: ClassVar[str]
    """The predicted tokens, as named in reports."""
    learns: ClassVar[bool]
    """Whether there is a loss on the text alone."""

    def read(self, model: nn.Module, ids: Tensor, rows: Sequence[int], **asked: Any) -> Any:
        """Run the model on its inputs for these sequences; asked: further arguments of the model."""
        ...

    def targets(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Int[Tensor, "rows places"]:
        """The target token for the logits at each place; IGNORED where there is none."""
        ...

    def answers(
        self, logits: Float[Tensor, "rows length vocabulary"], ids: Int[Tensor, "rows length"], rows: Sequence[int]
    ) -> tuple[Float[Tensor, "targets vocabulary"], Int[Tensor, " targets"]]:
        """The logits at the positions with a target, and the targets."""
        ...

    def predictions(self, output: Any) -> Float[Tensor, "rows places cells"] | None:
        """The logits of all distributions in an output of the model; None if it has none."""
        ...


@dataclass(frozen=True)
class NextTokens:
    """Causal language modelling: predict each token from the tokens before it; the first token is no target."""

    of: ClassVar[str] = "next tokens"
    learns: ClassVar[bool] = True

    def read(self, model: nn.Module, ids: Tensor, rows: Sequence[int], **asked: Any) -> Any:
        """Run a causal model. Raises ModelError for a model of another kind."""
        if kind_of(model) is not CAUSAL:
            raise ModelError(f"model: {described(model)}, not next tokens; use objective_of")
        return model(input_ids=ids, **without_cache(model), **asked)

    def targets(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Int[Tensor, "rows length"]:
        found = ids.roll(-1, 1)
        found[:, -1] = IGNORED
        return found

    def answers(self, logits: Tensor, ids: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        return logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()

    def predictions(self, output: Any) -> Tensor:
        return output.logits


NEXT_TOKENS = NextTokens()


@dataclass(frozen=True)
class MaskedTokens:
    """Masked language modelling (Devlin 2019, arXiv 1810.04805, section 3.1).

    A fraction of the tokens of each sequence are targets, at least one; special tokens never are. The input has the
    mask token at 80% of the targets, a random token at 10%, and the original token at 10%. The random choices depend
    only on the seed and the number of the sequence: a sequence has the same masks in every epoch, in every process and
    for every model.

    mask: the id of the mask token. vocabulary: random tokens have smaller ids. special: the ids of special tokens.
    """

    of: ClassVar[str] = "masked tokens"
    learns: ClassVar[bool] = True

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

    def predictions(self, output: Any) -> Tensor:
        return output.logits

    def draw(
        self, ids: Int[Tensor, "rows length"], rows: Sequence[int]
    ) -> tuple[Int[Tensor, "rows length"], Int[Tensor, "rows length"]]:
        """(inputs, targets). Raises CalibrationError for a sequence of special tokens only."""
        shown, targets = ids.cpu().clone(), torch.full(ids.shape, IGNORED)
        special = torch.tensor(self.special, dtype=ids.dtype)
        for row, inputs, wanted in zip(rows, shown, targets, strict=True):
            places = torch.isin(inputs, special, invert=True).nonzero()[:, 0]
            if not len(places):
                raise CalibrationError(
                    f"sequence {row} holds only special tokens, which cannot be masked; use a text with other tokens"
                )
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {row}".encode()))
            count = max(1, round(self.probability * len(places)))
            at = places[torch.randperm(len(places), generator=generator)[:count]]
            tokens = wanted[at] = inputs[at]
            chance = torch.rand(count, generator=generator)
            drawn = torch.randint(self.vocabulary, (count,), generator=generator)
            drawn = torch.where(chance < SHOWN_AS_MASK + SHOWN_AS_RANDOM, drawn, tokens)
            inputs[at] = torch.where(chance < SHOWN_AS_MASK, self.mask, drawn)
        return shown.to(ids.device), targets.to(ids.device)


@dataclass(frozen=True)
class TargetTokens:
    """Predict each token of a target from its source and from the tokens of the target before it (`kinds.inputs`)."""

    of: ClassVar[str] = "target tokens"
    learns: ClassVar[bool] = True

    def read(self, model: nn.Module, ids: Tensor, rows: Sequence[int], **asked: Any) -> Any:
        return run_on(model, ids, **asked)

    def targets(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Int[Tensor, "rows target"]:
        return source_and_target(ids)[1]

    def answers(self, logits: Tensor, ids: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        return logits.flatten(0, 1), source_and_target(ids)[1].flatten()

    def predictions(self, output: Any) -> Tensor:
        return output.logits


@dataclass(frozen=True)
class TranscriptTokens:
    """Predict each token of a transcript from its recording and from the tokens before it (`models.kinds.recordings`).

    The rows of a batch may have transcripts of several lengths. Then all logits and targets, one row after the other,
    count as those of one sequence, so that no place is padding.
    """

    of: ClassVar[str] = TargetTokens.of
    learns: ClassVar[bool] = True

    def read(self, model: nn.Module, ids: Tensor, rows: Sequence[int], **asked: Any) -> Any:
        found: dict[int, Tensor] = {}
        for group in by_shape(ids, targets=False):
            part = ids[group]
            logits = run_on(model, part, **asked).logits
            counts = part[:, 1].tolist()
            found |= {row: one[:count] for row, one, count in zip(group, logits, counts, strict=True)}
        each = [found[row] for row in range(len(ids))]
        equal = len({len(one) for one in each}) == 1
        return Seq2SeqLMOutput(logits=torch.stack(each) if equal else torch.cat(each)[None])  # pyright: ignore

    def targets(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Int[Tensor, "rows places"]:
        found = targets_in(ids)
        known = found != IGNORED
        return found if bool(known.all()) else found[known][None]

    def answers(self, logits: Tensor, ids: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        return logits.flatten(0, 1), self.targets(ids, rows).flatten()

    def predictions(self, output: Any) -> Tensor:
        return output.logits


@dataclass(frozen=True)
class Outputs:
    """The objective of a model without a language-model head: a text has no targets, only a teacher has outputs.

    model: in the words of a message. compared: what two models are compared by.
    """

    of: ClassVar[str] = "outputs"
    learns: ClassVar[bool] = False

    model: str
    compared: Compared

    def read(self, model: nn.Module, ids: Tensor, rows: Sequence[int], **asked: Any) -> Any:
        asked |= without_cache(model)
        if len(ids) == 1 or not needs_single_rows(model):
            return model(input_ids=ids, **asked)
        return joined([model(input_ids=row, **asked) for row in ids.split(1)])

    def targets(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Int[Tensor, "rows length"]:
        return torch.full_like(ids, IGNORED)

    def answers(self, logits: Tensor, ids: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        raise ModelError(f"model: {self.model} without a language-model head: it has no loss on a text")

    def predictions(self, output: Any) -> Tensor | None:
        return DISTRIBUTIONS[self.compared](_answer(output))

    def features(self, output: Any) -> Float[Tensor, "*rows width"]:
        """The values of an answer without distributions: hidden states of tokens, or the scores of a batch."""
        answer = _answer(output)
        return answer.flatten()[None] if self.compared == "score" else answer


def needs_single_rows(model: nn.Module) -> bool:
    """Whether transformers may refuse a batch: of classifiers that look for the last token that is no padding."""
    kind, config = kind_of(model), text_config(getattr(model, "config", None))
    return kind is not None and not kind.each and getattr(config, "pad_token_id", None) is None


def joined(outputs: Sequence[Any]) -> Any:
    """The output of a batch from those of its rows: the answer and, if asked for, the hidden states."""
    states = zip(*(one.hidden_states for one in outputs), strict=True) if outputs[0].hidden_states else ()
    logits = torch.cat([one.logits for one in outputs])
    return SequenceClassifierOutput(logits=logits, hidden_states=tuple(torch.cat(each) for each in states) or None)


def _answer(output: Any) -> Tensor:
    answer = answer_of(output)
    assert answer is not None  # a model is checked before it is used
    return answer


def check_learns(lm_objective: LMObjective, where: str, remedy: str) -> None:
    """Raise RecipeError where a pass needs a loss on the text and there is none. where: the label of the pass."""
    if isinstance(lm_objective, Outputs):
        raise RecipeError(
            f"{where}: {lm_objective.model} without a language-model head, so it has no loss on the text; {remedy}"
        )


def objective_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, seed: int = 0) -> LMObjective:
    """Return the objective of a model; seed: of masks.

    Raises ModelError when the model predicts masked tokens but its tokenizer has no mask token.
    """
    kind = kind_of(model)
    if kind in HEADLESS:
        return Outputs(described(model), kind.compared_in(model.config))
    if kind is PAIRED:
        return TargetTokens()
    if kind is RECORDED:
        return TranscriptTokens()
    if not is_masked(type(model), model.config):
        return NEXT_TOKENS
    size = vocabulary_size(model)
    mask: Any = None if tokenizer is None else tokenizer.mask_token_id
    if tokenizer is not None and mask is not None and mask < size:
        return MaskedTokens(mask, min(size, len(tokenizer)), special_ids(tokenizer), seed=seed)
    lack = "it has no tokenizer" if tokenizer is None else "its tokenizer has no mask token"
    if mask is not None:
        lack = f"the mask token of its tokenizer is {mask}, outside the model's vocabulary of {size} tokens"
    raise ModelError(
        f"model: {type(model).__name__} predicts masked tokens, but {lack}; save a tokenizer with a mask token in "
        "the model's folder (tokenizer.save_pretrained), or pass one to compress.apply (tokenizer=)"
    )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids of a tokenizer's special tokens, in order."""
    added = {token for token, known in tokenizer.added_tokens_decoder.items() if known.special}
    return tuple(sorted(added | set(tokenizer.all_special_ids)))


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The argument that turns a model's cache off; empty for a model whose text configuration has no `use_cache`."""
    config = getattr(model, "config", None)
    return {"use_cache": False} if config is None or hasattr(text_config(config), "use_cache") else {}


def run_on(model: nn.Module, ids: Int[Tensor, "rows length"], **asked: Any) -> Any:
    """Run a model on rows of ids, without a cache. asked: further arguments of the model."""
    return model(**inputs_of(model, ids), **without_cache(model), **asked)


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model; the configuration itself if it has no parts."""
    return config.get_text_config() if isinstance(config, PretrainedConfig) else config
