"""Loglikelihoods of continuations: each distinct input is computed once, and the choices of an item share its prefix.

The choices of a multiple-choice item begin with the same tokens. Items with prefixes of similar length are computed
together in two steps, without padding of the prefix: their first tokens, as many as the shortest prefix has, fill the
KV cache, and the remaining tokens of every choice continue it. Only positions that are asked for reach the output head.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import CannotRun, NumericError, call_foreign
from compress.models.kinds.objective import without_cache

Tokens = tuple[int, ...]
Logs = Float[Tensor, "positions vocabulary"]

SHORTEST = 4  # tokens; a shorter common prefix is not worth a second forward pass
CALL_TOKENS = 24  # assumed cost of one more forward pass, in tokens: the weights are read again
CALL_TOKENS_GPU = 2048  # below this number of tokens a forward pass on a GPU takes about the same time
PROBED = 3  # items that are computed both ways before the cache is trusted
TOLERANCE = 2e-4  # relative, in float32; the order of sums differs
TOLERANCE_16 = 5e-2  # in 16-bit floats


class Request(NamedTuple):
    """A continuation whose loglikelihood is asked for. item: requests with one item share their prefix."""

    item: Any
    context: Tokens
    continuation: Tokens


class Answer(NamedTuple):
    """The sum of the log-probabilities of a continuation, and whether it is the greedy one."""

    loglikelihood: float
    greedy: bool


@dataclass
class Input:
    """A distinct input of the model. start: the first position whose logits are asked for."""

    tokens: Tokens
    start: int
    asked: list[int] = field(default_factory=list)


@dataclass
class Scorer:
    """Computes answers with one model.

    longest: tokens that the model can read; longer inputs lose their beginning. batch_tokens: of one forward pass.
    shares: whether prefixes are shared; it turns off with a note where the results differ from those without.
    """

    model: PreTrainedModel
    longest: int
    batch_tokens: int = 4096
    note: Callable[[str], None] = lambda _: None
    shares: bool = True
    proven: bool = False
    truncated: int = 0

    def score(self, requests: Sequence[Request]) -> Iterator[list[tuple[int, Answer]]]:
        """The answers with the indices of their requests, after each batch. Raises NumericError for NaN logits."""
        groups = self._inputs(requests)
        answers: list[tuple[int, Answer]] = []

        def take(one: Input, logs: Logs) -> None:
            answers.extend((index, answer(requests[index], logs)) for index in one.asked)

        if self.shares and not self.proven:
            tried = sorted((g for g in groups if common(g) >= SHORTEST), key=lambda g: -len(g))[:PROBED]
            self.proven = bool(tried)
            self.shares = self._proven(tried, take)
            yield answers
            groups, answers = [group for group in groups if not any(group is one for one in tried)], []
        shared = [group for group in groups if self.shares and common(group) >= SHORTEST]
        alone = [one for group in groups if not (self.shares and common(group) >= SHORTEST) for one in group]
        for batch in by_tokens(sorted(alone, key=lambda one: -len(one.tokens)), self.batch_tokens):
            self._plain(batch, take)
            yield answers
            answers = []
        for items in by_prefix(shared, self.batch_tokens, self.call_tokens):
            self._shared(items, take)
            yield answers
            answers = []

    def _inputs(self, requests: Sequence[Request]) -> list[list[Input]]:
        """The distinct inputs of each item."""
        known: dict[tuple[Any, Tokens], Input] = {}
        groups: dict[Any, list[Input]] = defaultdict(list)
        for index, request in enumerate(requests):
            whole = request.context + request.continuation
            self.truncated += len(whole) > self.longest + 1
            tokens = whole[-(self.longest + 1) :][:-1]
            start = len(tokens) - len(request.continuation)
            key = (request.item, tokens)
            if key not in known:
                known[key] = Input(tokens, start)
                groups[request.item].append(known[key])
            known[key].start = min(known[key].start, start)
            known[key].asked.append(index)
        return list(groups.values())

    def _plain(self, batch: Sequence[Input], take: Callable[[Input, Logs], None]) -> None:
        """Inputs side by side, padded at their end: a causal model does not see what follows."""
        ids = padded([one.tokens for one in batch])
        places = [(row, slice(one.start, len(one.tokens))) for row, one in enumerate(batch)]
        logits = self._logits(ids, places, **without_cache(self.model))
        for one, logs in zip(batch, logits, strict=True):
            take(one, logs)

    def _shared(self, groups: Sequence[Sequence[Input]], take: Callable[[Input, Logs], None]) -> None:
        """Items that begin with prefixes of one length: prefixes first, then the rest of every input."""
        length = min(common(group) for group in groups)
        prefixes = torch.tensor([group[0].tokens[:length] for group in groups])
        starts = [min(min(one.start for one in group), length) for group in groups]
        cache: list[Any] = []
        first = self._logits(
            prefixes, [(row, slice(start, length)) for row, start in enumerate(starts)], cache, use_cache=True
        )
        after: dict[int, Logs] = {}
        rows = {id(one): row for row, group in enumerate(groups) for one in group}
        rest = sorted((o for group in groups for o in group if len(o.tokens) > length), key=lambda o: -len(o.tokens))
        for batch in by_padding(rest, length, self.call_tokens):
            selected = copy.deepcopy(cache[0])
            selected.batch_select_indices(torch.tensor([rows[id(one)] for one in batch], device=self.model.device))
            ids = padded([one.tokens[length:] for one in batch])
            places = [(i, slice(max(o.start - length, 0), len(o.tokens) - length)) for i, o in enumerate(batch)]
            logits = self._logits(ids, places, past_key_values=selected, use_cache=True)
            after |= {id(one): logs for one, logs in zip(batch, logits, strict=True)}
        for row, group in enumerate(groups):
            for one in group:
                parts = [first[row][max(one.start - starts[row], 0) :]] if one.start < length else []
                parts += [after[id(one)]] if id(one) in after else []
                take(one, torch.cat(parts))

    @property
    def call_tokens(self) -> int:
        """The number of tokens whose computation costs as much as one more forward pass."""
        return CALL_TOKENS if self.model.device.type == "cpu" else CALL_TOKENS_GPU

    @torch.no_grad()
    def _logits(
        self, ids: Tensor, places: Sequence[tuple[int, slice]], cache: list[Any] | None = None, **asked: Any
    ) -> list[Tensor]:
        """The logits at some places (row, positions) of a batch. cache: receives the KV cache."""
        rows = torch.cat([torch.full((at.stop - at.start,), row) for row, at in places])
        columns = torch.cat([torch.arange(at.start, at.stop) for _, at in places])
        with selecting(self.model, rows, columns) as selected:
            output = self.model(input_ids=ids.to(self.model.device), **asked)
        if cache is not None:
            cache.append(output.past_key_values)
        logits = output.logits[0] if selected() else output.logits[rows, columns]
        if bool(logits.isnan().any()):
            raise NumericError("the model's logits are NaN; evaluate it with --dtype float32, or write it again")
        return list(logits.split([at.stop - at.start for _, at in places]))

    def _proven(self, tried: Sequence[Sequence[Input]], take: Callable[[Input, Logs], None]) -> bool:
        """Whether some items give the same logits with and without a shared prefix. take: gets those without."""
        plain: dict[int, Tensor] = {}
        shared: dict[int, Tensor] = {}

        def keep(one: Input, logs: Logs) -> None:
            plain[id(one)] = logs
            take(one, logs)

        for group in tried:
            self._plain(group, keep)
        for group in tried:
            try:
                call_foreign(self._shared, [group], lambda one, logs: shared.update({id(one): logs}))
            except CannotRun as error:
                self.note(f"prefixes are not shared: the model's cache cannot be used ({type(error.cause).__name__})")
                return False
        limit = TOLERANCE if self.model.dtype == torch.float32 else TOLERANCE_16
        differences = (
            float((shared[i] - logits).abs().max() / logits.abs().max().clamp(min=1)) for i, logits in plain.items()
        )
        worst = max(differences, default=0.0)
        if worst > limit:
            self.note(
                f"prefixes are not shared: with the cache the logits differ by {worst:.2g} of their largest value"
            )
        return worst <= limit


def answer(request: Request, logits: Logs) -> Answer:
    """The answer to a request from the logits that end with those of its continuation."""
    targets = torch.tensor(request.continuation, device=logits.device)
    logs = logits[-len(targets) :].float().log_softmax(-1)
    return Answer(float(logs.gather(-1, targets[:, None]).sum()), bool((logs.argmax(-1) == targets).all()))


def common(group: Sequence[Input]) -> int:
    """The length of the common prefix of the inputs of an item; 0 for one input."""
    if len(group) < 2:
        return 0
    first, last = min(one.tokens for one in group), max(one.tokens for one in group)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def by_tokens(inputs: Sequence[Input], most: int) -> Iterator[list[Input]]:
    """Batches of inputs in descending order of length, at most so many tokens with their padding."""
    batch: list[Input] = []
    for one in inputs:
        if batch and (len(batch) + 1) * len(batch[0].tokens) > most:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def by_padding(inputs: Sequence[Input], length: int, call: int) -> Iterator[list[Input]]:
    """Batches of inputs in descending order of length, after a prefix of a length.

    A batch ends where the padding of one more input costs more than another forward pass.
    """
    batch: list[Input] = []
    for one in inputs:
        if batch and len(batch[0].tokens) - len(one.tokens) > max(call // 4, 1):
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def by_prefix(groups: Sequence[list[Input]], most: int, call: int) -> Iterator[list[list[Input]]]:
    """Batches of items with common prefixes of similar length; the tokens in the cache stay below `most`.

    All items of a batch share as many tokens as the item with the shortest prefix; the others compute the rest of their
    prefix for each choice. A batch ends where that costs more than the two forward passes of another batch.
    """
    batch: list[list[Input]] = []
    size = rows = 0
    for group in sorted(groups, key=lambda group: -common(group)):
        tokens = len(group) * max(len(one.tokens) for one in group)
        waste = (common(batch[-1]) - common(group)) * rows if batch else 0
        if batch and (size + tokens > most or waste > 2 * call):
            yield batch
            batch, size, rows = [], 0, 0
        batch.append(group)
        size, rows = size + tokens, rows + len(group) - 1
    if batch:
        yield batch


def padded(rows: Sequence[Tokens]) -> Tensor:
    """Rows of ids as one tensor; the end of shorter rows is filled with 0."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


@contextmanager
def selecting(model: PreTrainedModel, rows: Tensor, columns: Tensor) -> Iterator[Callable[[], bool]]:
    """Let only some positions reach the output head; the logits are then [1, positions, vocabulary].

    Yields a function that says whether the head was reached.
    """
    head: nn.Module | None = model.get_output_embeddings()
    reached: list[bool] = []

    def select(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        reached.append(True)
        return (args[0][rows, columns][None], *args[1:])

    handle = None if head is None else head.register_forward_pre_hook(select)
    try:
        yield lambda: bool(reached)
    finally:
        if handle is not None:
            handle.remove()
