"""Loglikelihoods of continuations: each distinct input is computed once, and the choices of an item share its prefix.

The choices of a multiple-choice item begin with the same tokens. Items with prefixes of similar length are computed
together in two steps, without padding of the prefix: their first tokens, as many as the shortest prefix has, fill the
KV cache, and the remaining tokens of every choice continue it. Only requested positions reach the LM head.
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
from compress.models.kinds.contract import without_cache

Tokens = tuple[int, ...]
Logs = Float[Tensor, "positions vocabulary"]

SHORTEST = 4  # tokens; a shorter common prefix is not worth a second forward pass
CALL_TOKENS = 24  # assumed cost of one more forward pass, in tokens: the weights are read again
CALL_TOKENS_GPU = 2048  # below this number of tokens a forward pass on a GPU takes about the same time
PROBED = 3  # items that are computed both ways before the cache is trusted
TOLERANCE = 2e-4  # relative, in float32; the order of sums differs
TOLERANCE_16 = 5e-2  # in 16-bit floats


class Request(NamedTuple):
    """A continuation whose loglikelihood is requested.

    Attributes:
        item: Requests with the same item share their prefix.
        context: Token ids before the continuation.
        continuation: Token ids.
    """

    item: Any
    context: Tokens
    continuation: Tokens


class Answer(NamedTuple):
    """The sum of the log-probabilities of a continuation, and whether it is the greedy one."""

    loglikelihood: float
    greedy: bool


@dataclass
class Input:
    """A distinct input of the model.

    Attributes:
        tokens: Token ids.
        start: First position whose logits are requested.
        requests: Indices of the requests that it answers.
    """

    tokens: Tokens
    start: int
    requests: list[int] = field(default_factory=list)


@dataclass
class Scorer:
    """Computes answers with one model.

    Attributes:
        model: The model.
        longest: Number of tokens that the model can read; the beginning of longer inputs is cut off.
        batch_tokens: Tokens of one forward pass.
        note: Receives notes.
        shares: Whether prefixes are shared; it turns off with a note if that changes the results.
        proven: Whether results with shared prefixes were compared with those without.
        truncated: Number of inputs whose beginning was cut off.
    """

    model: PreTrainedModel
    longest: int
    batch_tokens: int = 4096
    note: Callable[[str], None] = lambda _: None
    shares: bool = True
    proven: bool = False
    truncated: int = 0

    def score(self, requests: Sequence[Request]) -> Iterator[list[tuple[int, Answer]]]:
        """Compute answers.

        Yields:
            Pairs (index of the request, answer) of each batch.

        Raises:
            NumericError: for logits that are NaN.
        """
        groups = self._inputs(requests)
        answers: list[tuple[int, Answer]] = []

        def take(entry: Input, logs: Logs) -> None:
            answers.extend((index, answer(requests[index], logs)) for index in entry.requests)

        if self.shares and not self.proven:
            probed_groups = sorted((g for g in groups if common(g) >= SHORTEST), key=lambda g: -len(g))[:PROBED]
            self.proven = bool(probed_groups)
            self.shares = self._proven(probed_groups, take)
            yield answers
            groups, answers = [group for group in groups if not any(group is entry for entry in probed_groups)], []
        shared = [group for group in groups if self.shares and common(group) >= SHORTEST]
        alone = [entry for group in groups if not (self.shares and common(group) >= SHORTEST) for entry in group]
        for batch in by_tokens(sorted(alone, key=lambda entry: -len(entry.tokens)), self.batch_tokens):
            self._plain(batch, take)
            yield answers
            answers = []
        for items in by_prefix(shared, self.batch_tokens, self.call_tokens):
            self._shared(items, take)
            yield answers
            answers = []

    def _inputs(self, requests: Sequence[Request]) -> list[list[Input]]:
        """The distinct inputs of each item."""
        input_by_key: dict[tuple[Any, Tokens], Input] = {}
        groups: dict[Any, list[Input]] = defaultdict(list)
        for index, request in enumerate(requests):
            all_tokens = request.context + request.continuation
            self.truncated += len(all_tokens) > self.longest + 1
            tokens = all_tokens[-(self.longest + 1) :][:-1]
            start = len(tokens) - len(request.continuation)
            key = (request.item, tokens)
            if key not in input_by_key:
                input_by_key[key] = Input(tokens, start)
                groups[request.item].append(input_by_key[key])
            input_by_key[key].start = min(input_by_key[key].start, start)
            input_by_key[key].requests.append(index)
        return list(groups.values())

    def _plain(self, batch: Sequence[Input], take: Callable[[Input, Logs], None]) -> None:
        """Compute inputs as one batch, padded at their end: a causal model does not see what follows."""
        ids = padded([entry.tokens for entry in batch])
        places = [(row, slice(entry.start, len(entry.tokens))) for row, entry in enumerate(batch)]
        logits = self._logits(ids, places, **without_cache(self.model))
        for entry, logs in zip(batch, logits, strict=True):
            take(entry, logs)

    def _shared(self, groups: Sequence[Sequence[Input]], take: Callable[[Input, Logs], None]) -> None:
        """Compute items that begin with prefixes of one length: prefixes first, then the tokens after them."""
        length = min(common(group) for group in groups)
        prefixes = torch.tensor([group[0].tokens[:length] for group in groups])
        starts = [min(min(entry.start for entry in group), length) for group in groups]
        cache: list[Any] = []
        prefix_logits = self._logits(
            prefixes, [(row, slice(start, length)) for row, start in enumerate(starts)], cache, use_cache=True
        )
        logits_by_input: dict[int, Logs] = {}
        rows = {id(entry): row for row, group in enumerate(groups) for entry in group}
        remaining = sorted(
            (entry for group in groups for entry in group if len(entry.tokens) > length),
            key=lambda entry: -len(entry.tokens),
        )
        for batch in by_padding(remaining, length, self.call_tokens):
            selected = copy.deepcopy(cache[0])
            selected.batch_select_indices(torch.tensor([rows[id(entry)] for entry in batch], device=self.model.device))
            ids = padded([entry.tokens[length:] for entry in batch])
            places = [
                (i, slice(max(entry.start - length, 0), len(entry.tokens) - length)) for i, entry in enumerate(batch)
            ]
            logits = self._logits(ids, places, past_key_values=selected, use_cache=True)
            logits_by_input |= {id(entry): logs for entry, logs in zip(batch, logits, strict=True)}
        for row, group in enumerate(groups):
            for entry in group:
                parts = [prefix_logits[row][max(entry.start - starts[row], 0) :]] if entry.start < length else []
                parts += [logits_by_input[id(entry)]] if id(entry) in logits_by_input else []
                take(entry, torch.cat(parts))

    @property
    def call_tokens(self) -> int:
        """The number of tokens whose computation costs as much as one more forward pass."""
        return CALL_TOKENS if self.model.device.type == "cpu" else CALL_TOKENS_GPU

    @torch.no_grad()
    def _logits(
        self, ids: Tensor, places: Sequence[tuple[int, slice]], cache: list[Any] | None = None, **options: Any
    ) -> list[Tensor]:
        """Compute the logits at some places (row, positions) of a batch; the KV cache is appended to `cache`."""
        rows = torch.cat([torch.full((positions.stop - positions.start,), row) for row, positions in places])
        columns = torch.cat([torch.arange(positions.start, positions.stop) for _, positions in places])
        with selecting(self.model, rows, columns) as selected:
            output = self.model(input_ids=ids.to(self.model.device), **options)
        if cache is not None:
            cache.append(output.past_key_values)
        logits = output.logits[0] if selected() else output.logits[rows, columns]
        if bool(logits.isnan().any()):
            raise NumericError("the model's logits are NaN; evaluate it with dtype float32, or write it again")
        return list(logits.split([positions.stop - positions.start for _, positions in places]))

    def _proven(self, groups: Sequence[Sequence[Input]], take: Callable[[Input, Logs], None]) -> bool:
        """Return whether items have the same logits with and without a shared prefix; `take` receives those without."""
        plain: dict[int, Tensor] = {}
        shared: dict[int, Tensor] = {}

        def keep(entry: Input, logs: Logs) -> None:
            plain[id(entry)] = logs
            take(entry, logs)

        for group in groups:
            self._plain(group, keep)
        for group in groups:
            try:
                call_foreign(self._shared, [group], lambda entry, logs: shared.update({id(entry): logs}))
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
    """Compute the answer to a request from the logits that end with those of its continuation."""
    targets = torch.tensor(request.continuation, device=logits.device)
    logs = logits[-len(targets) :].float().log_softmax(-1)
    return Answer(float(logs.gather(-1, targets[:, None]).sum()), bool((logs.argmax(-1) == targets).all()))


def common(group: Sequence[Input]) -> int:
    """Return the length of the common prefix of the inputs of an item; 0 for one input."""
    if len(group) < 2:
        return 0
    smallest, largest = min(entry.tokens for entry in group), max(entry.tokens for entry in group)
    return next(
        (i for i, (a, b) in enumerate(zip(smallest, largest, strict=False)) if a != b), min(len(smallest), len(largest))
    )


def by_tokens(inputs: Sequence[Input], max_tokens: int) -> Iterator[list[Input]]:
    """Yield batches of inputs in descending order of length, with at most `max_tokens` tokens including padding."""
    batch: list[Input] = []
    for entry in inputs:
        if batch and (len(batch) + 1) * len(batch[0].tokens) > max_tokens:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def by_padding(inputs: Sequence[Input], length: int, call: int) -> Iterator[list[Input]]:
    """Yield batches of inputs in descending order of length, after a prefix of a length.

    A batch ends where the padding of one more input costs more than another forward pass.
    """
    batch: list[Input] = []
    for entry in inputs:
        if batch and len(batch[0].tokens) - len(entry.tokens) > max(call // 4, 1):
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def by_prefix(groups: Sequence[list[Input]], max_tokens: int, call: int) -> Iterator[list[list[Input]]]:
    """Yield batches of items with common prefixes of similar length, with at most `max_tokens` tokens in the cache.

    All items of a batch share as many tokens as the item with the shortest prefix; the others compute the rest of their
    prefix for each choice. A batch ends where that costs more than the two forward passes of another batch.
    """
    batch: list[list[Input]] = []
    size = rows = 0
    for group in sorted(groups, key=lambda group: -common(group)):
        tokens = len(group) * max(len(entry.tokens) for entry in group)
        waste = (common(batch[-1]) - common(group)) * rows if batch else 0
        if batch and (size + tokens > max_tokens or waste > 2 * call):
            yield batch
            batch, size, rows = [], 0, 0
        batch.append(group)
        size, rows = size + tokens, rows + len(group) - 1
    if batch:
        yield batch


def padded(rows: Sequence[Tokens]) -> Tensor:
    """Stack rows of ids; the end of shorter rows is filled with 0."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


@contextmanager
def selecting(model: PreTrainedModel, rows: Tensor, columns: Tensor) -> Iterator[Callable[[], bool]]:
    """Pass only some positions to the LM head; the logits are then [1, positions, vocabulary].

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
