"""Sample calibration text from the model itself (LLM-QAT)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from compress.data.conversations import Turns
from compress.data.overlap import run_hashes
from compress.errors import CalibrationError
from compress.models.cache_size import cache_bytes
from compress.models.kinds.kinds import adapter_of, described
from compress.models.kinds.masked import special_ids
from compress.models.structure.ends import vocabulary_size

GREEDY_TOKENS = (3, 5)  # LLM-QAT, sec. 3.1: range of the number of greedy tokens after the first; the rest is sampled
LARGEST_BATCH = 64
"""Most sequences that are sampled together. A step for 64 takes a few times as long as a step for one."""
LARGEST_CACHE = 1 << 30
"""Largest size in bytes of the keys and values of sequences that are sampled together."""
LOOP = 8
"""Tokens of an n-gram of `repetition`: short phrases of ordinary text repeat, too."""
ATTEMPTS = 2
"""Sequences are sampled at most so many times as often as asked, to replace those with loops."""


@dataclass(frozen=True)
class Sampling:
    """Options of sampled text.

    Attributes:
        batch: Sequences that are sampled together; None: as many as a cache of `LARGEST_CACHE` bytes allows.
        prefix: Tokens that every sequence begins with.
        temperature: Divides the logits.
        max_repetition: Sequences with a larger share of repeated runs of tokens (`repetition`) are replaced.
        turns: Tokens around the messages of conversations, which begin each sequence instead of `prefix`; None: plain
            text.
    """

    batch: int | None = None
    prefix: Sequence[int] = ()
    temperature: float = 1.0
    max_repetition: float = 0.3
    turns: Turns | None = None


def self_sampled(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int,
    length: int,
    seed: int,
    sampling: Sampling = Sampling(),
) -> Int[Tensor, "sequences length"]:
    """Sample calibration text from the model itself (LLM-QAT, https://arxiv.org/abs/2305.17888, sec. 3.1).

    Each document starts with one token drawn uniformly from the vocabulary without its special tokens. The next 3 to 5
    tokens are the most likely ones; all later tokens are sampled from the softmax. Where the model ends a document,
    the next one starts. Sequences with loops are replaced.

    With `sampling.turns`, documents are conversations instead: the model writes the user's message after the tokens
    that the chat template puts before it (Magpie, https://arxiv.org/abs/2406.08464, sec. 2.1), then the answer after
    the tokens of the template between both. All of their tokens are sampled.

    The draws of a sequence depend on `seed` and its number only, so `batch` changes tokens only through the rounding
    of sums.

    Args:
        model: The model, with all weights.
        tokenizer: Its tokenizer.
        sequences: Number of sequences.
        length: Tokens of a sequence.
        seed: Seed of all draws. The global random state is neither read nor changed.
        sampling: How it is sampled.

    Returns:
        Token ids (int64, on the CPU).

    Raises:
        CalibrationError: for a count below 1, and for a model that cannot generate text.
    """
    if not adapter_of(model).streams:
        raise CalibrationError(
            f"calibration: {described(model)} and cannot generate text (source self); use "
            "another source, such as embedded, or a .txt, .jsonl or .npy file"
        )
    for name, count in (("sequences", sequences), ("length", length), ("batch", sampling.batch)):
        if count is not None and count < 1:
            raise CalibrationError(f"self: {name} is {count}; use 1 or more")
    batch = sampling.batch or sampled_together(model, length)
    generator = torch.Generator().manual_seed(seed)
    accepted, rejected, attempts = [], [], ATTEMPTS * sequences
    with _plain_generation(model):
        while len(accepted) < sequences and attempts > 0:
            size = min(batch, sequences - len(accepted), attempts)
            draws = torch.rand(size, length, generator=generator, dtype=torch.float64)
            rows = _sampled(model, tokenizer, draws, sampling)
            for row, share in zip(rows, repetition(rows).tolist(), strict=True):
                (accepted if share <= sampling.max_repetition else rejected).append((share, row))
            attempts -= size
    rejected.sort(key=lambda item: item[0])
    return torch.stack([row for _, row in [*accepted, *rejected][:sequences]])


def sampled_together(model: PreTrainedModel, length: int) -> int:
    """Return the number of sequences whose keys and values fit into a cache of `LARGEST_CACHE` bytes, at least 1."""
    return int(max(1, min(LARGEST_BATCH, LARGEST_CACHE // cache_bytes(model, 1, length, model.dtype))))


def repetition(ids: Int[Tensor, "rows length"]) -> Float[Tensor, " rows"]:
    """Return the share of the n-grams of each row (n = `LOOP`) that occur earlier in the row."""
    count = ids.shape[1] - LOOP + 1
    if count < 1:
        return torch.zeros(len(ids))
    return torch.tensor([1 - len(set(row.tolist())) / count for row in run_hashes(ids.numpy(), LOOP)])


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Hide the generation config of a model, whose end tokens and penalties would change the text."""
    config: Any = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = config


def _sampled(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    draws: Float[Tensor, "rows length"],
    sampling: Sampling,
) -> Int[Tensor, "rows length"]:
    rows, length = draws.shape
    ends, turns = end_ids(model, tokenizer), sampling.turns
    if turns is None:
        chooser = DrawnTokens(draws, start_ids(model, tokenizer), ends, sampling.temperature)
        begin = torch.tensor(sampling.prefix, dtype=torch.int64).expand(rows, -1)[:, :length]
        if begin.shape[1] < length:
            start = [chooser.begin(row, begin.shape[1]) for row in range(rows)]
            begin = torch.cat([begin, torch.tensor(start).reshape(rows, 1)], dim=1)
    else:
        chooser = DrawnConversations(draws, turns, ends, sampling.temperature)
        begin = torch.tensor(turns.opening).expand(rows, -1)[:, :length]
    if begin.shape[1] == length:
        return begin
    begin = begin.to(model.device)
    config = GenerationConfig(do_sample=False, max_new_tokens=length - begin.shape[1])
    return model.generate(
        begin,
        attention_mask=torch.ones_like(begin),
        generation_config=config,
        logits_processor=LogitsProcessorList([chooser]),
    ).cpu()


class DrawnTokens(LogitsProcessor):
    """Choose the next token of each sequence by draws that are given; transformers then takes the largest score.

    Attributes:
        draws: Uniform numbers in [0, 1) for each position of each sequence.
        starts: Tokens that documents start with.
        ends: Tokens that end a document.
        temperature: Divides the logits.
        greedy_until: Position of each sequence before which the most likely token is taken.
    """

    def __init__(
        self,
        draws: Float[Tensor, "rows length"],
        starts: Int[Tensor, " starts"],
        ends: Int[Tensor, " ends"],
        temperature: float,
    ) -> None:
        self.draws, self.starts, self.ends, self.temperature = draws, starts, ends, temperature
        self.greedy_until = [0] * len(draws)

    def begin(self, row: int, position: int) -> int:
        """Return the first token of a document at a position of a sequence."""
        scaled = float(self.draws[row, position]) * len(self.starts)
        low, high = GREEDY_TOKENS
        self.greedy_until[row] = position + 1 + low + int((scaled % 1) * (high + 1 - low))
        return int(self.starts[int(scaled)])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores whose largest entry is the chosen token."""
        position = input_ids.shape[1]
        logits = scores.float() / self.temperature
        has_ended = torch.isin(input_ids[:, -1].cpu(), self.ends).tolist()
        is_greedy = [position < until for until in self.greedy_until]
        tokens = inverse_cdf(logits, self.draws[:, position].to(logits.device))
        if any(is_greedy):
            # an empty document says nothing
            likely = logits.index_fill(1, self.ends.to(logits.device), -torch.inf).argmax(dim=-1)
            tokens = torch.where(torch.tensor(is_greedy, device=logits.device), likely, tokens)
        for row in (row for row, ended in enumerate(has_ended) if ended):
            tokens[row] = self.begin(row, position)
        return one_hot_scores(logits, tokens)


class DrawnConversations(LogitsProcessor):
    """As `DrawnTokens`, with the tokens of a chat template around each message.

    Attributes:
        draws: Uniform numbers in [0, 1) for each position of each sequence, which begins with `turns.opening`.
        turns: Tokens around the messages.
        ends: Tokens that end an answer, and with it the conversation; so does the one that ends a message.
        temperature: Divides the logits.
        forced: The tokens of the template that come next in each sequence.
        answers: Whether the message of each sequence is an answer.
    """

    def __init__(
        self, draws: Float[Tensor, "rows length"], turns: Turns, ends: Int[Tensor, " ends"], temperature: float
    ) -> None:
        self.draws, self.turns, self.temperature = draws, turns, temperature
        self.ends = torch.cat([ends, torch.tensor(turns.reply[:1])]).unique()
        self.forced: list[list[int]] = [[] for _ in draws]
        self.answers = [False] * len(draws)
        self._starts = [True] * len(draws)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores whose largest entry is the chosen token."""
        has_ended = torch.isin(input_ids[:, -1].cpu(), self.ends).tolist()
        for row, ended in enumerate(has_ended):
            if ended and not self.forced[row] and not self._starts[row]:
                self._turn(row, int(input_ids[row, -1]))
        logits = scores.float() / self.temperature
        starts = torch.tensor(self._starts, device=logits.device)[:, None]
        nonempty = logits.index_fill(1, self.ends.to(logits.device), -torch.inf)
        drawn = self.draws[:, input_ids.shape[1]].to(logits.device)
        tokens = inverse_cdf(torch.where(starts, nonempty, logits), drawn)
        for row, forced in enumerate(self.forced):
            if forced:
                tokens[row] = forced.pop(0)
                self._starts[row] = not forced
            else:
                self._starts[row] = False
        return one_hot_scores(logits, tokens)

    def _turn(self, row: int, last: int) -> None:
        """Begin the answer after a user's message that ended as the template ends it, else a new conversation."""
        answers = not self.answers[row] and last == self.turns.reply[0]
        self.forced[row] = list(self.turns.reply[1:] if answers else self.turns.opening)
        self.answers[row], self._starts[row] = answers, not self.forced[row]


def one_hot_scores(
    logits: Float[Tensor, "rows vocabulary"], tokens: Int[Tensor, " rows"]
) -> Float[Tensor, "rows vocabulary"]:
    """Return scores of which transformers takes the given token of each row."""
    return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def inverse_cdf(logits: Float[Tensor, "rows vocabulary"], draws: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Return the token of each row at which the cumulative probability exceeds the draw."""
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    bounds = (draws.to(cumulative.dtype) * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, bounds, right=True)[:, 0].clamp(max=logits.shape[1] - 1)


def start_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " ids"]:
    """Return the ids of the vocabulary without special tokens."""
    special = set(special_ids(tokenizer))
    size = min(len(tokenizer), vocabulary_size(model))
    return torch.tensor([token for token in range(size) if token not in special])


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " ids"]:
    """Return the ids that end a document, by the configuration of the model and by the tokenizer."""
    stated: Any = getattr(model.config, "eos_token_id", None)
    end_of_text: Any = tokenizer.eos_token_id
    ids = {token for token in (*(stated if isinstance(stated, list) else [stated]), end_of_text) if token is not None}
    return torch.tensor(sorted(ids), dtype=torch.int64)
