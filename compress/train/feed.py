"""What a training reads in each step: sequences of a fixed set in shuffled epochs, or new ones of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from compress.data.training_text import TrainingText
from compress.models.kinds.batch import Examples
from compress.passes.contract.processes import Processes
from compress.train.options import LoopOptions

STREAM = "stream/"
"""Prefix of the unused tokens of streams in the state file."""


@dataclass(frozen=True, eq=False)
class Part:
    """Examples of one forward pass.

    Attributes:
        examples: the examples.
        rows: their numbers among all examples.
    """

    examples: Examples | Tensor
    rows: list[int]


Count = Callable[[Part], Sequence[int]]
"""Returns the items of a part by term (`CountedObjective.counts`)."""


def part_weights(counts: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[tuple[float, ...]]:
    """Return factors with which the mean over examples of the losses of parts is the mean over their items.

    Args:
        counts: items of each part, by term.
        sizes: examples of each part.

    Returns:
        The factor of each term of each part; exactly 1 where every example has equally many items.
    """
    totals = [sum(terms) for terms in zip(*counts, strict=True)]
    examples = sum(sizes)
    return [
        tuple(count * examples / (size * total) if total else 0.0 for count, total in zip(part, totals, strict=True))
        for part, size in zip(counts, sizes, strict=True)
    ]


class Feed(ABC):
    """The examples of every step.

    Attributes:
        steps: number of steps.
        held_out: the examples that are held out of the training, in batches.
    """

    steps: int
    held_out: list[Part]

    @abstractmethod
    def parts(self, step: int) -> list[Part]:
        """Return what this process reads in a step. A stream has steps in order."""

    @abstractmethod
    def weights(self, step: int, parts: Sequence[Part], count: Count) -> list[tuple[float, ...]]:
        """Return the factors of the terms of the loss of this process's parts in a step (`part_weights`)."""

    @abstractmethod
    def state(self) -> tuple[list[Any], dict[str, Tensor]]:
        """Return the position of every process: JSON values, and tensors by name."""

    @abstractmethod
    def resume(self, record: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        """Move to a position that `state` returned. tensors: also others."""

    def notes(self) -> list[str]:
        """Return what is worth a note and has not been returned before."""
        return []

    def uses(self) -> list[Any]:
        """Return what every process has read of streams (`results.result.StreamRecord`)."""
        return []


class FixedFeed(Feed):
    """Shuffled epochs over examples in memory."""

    def __init__(self, examples: Examples | Int[Tensor, "examples ..."], settings: LoopOptions, processes: Processes):
        self._examples, self._processes = examples, processes
        rows, held_out_rows = settings.split(len(examples))
        self._order = settings.order(rows, processes.size)
        self.steps = len(self._order)
        batch = settings.batch
        self.held_out = [self._part(held_out_rows[i : i + batch]) for i in range(0, len(held_out_rows), batch)]

    def _part(self, rows: list[int]) -> Part:
        return Part(self._examples[rows], rows)

    def parts(self, step: int) -> list[Part]:
        return [self._part(rows) for rows in self._processes.share(self._order[step].tolist())]

    def weights(self, step: int, parts: Sequence[Part], count: Count) -> list[tuple[float, ...]]:
        parts_of_all = [self._part(rows) for rows in self._order[step].tolist()]
        counts = [count(part) for part in parts_of_all]
        return self._processes.share(part_weights(counts, [len(part.rows) for part in parts_of_all]))

    def state(self) -> tuple[list[Any], dict[str, Tensor]]:
        return [], {}  # the step says what was read

    def resume(self, record: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        pass


class StreamFeed(Feed):
    """New sequences of streams in every step; each process reads other files of them."""

    def __init__(self, text: TrainingText, settings: LoopOptions, processes: Processes):
        assert settings.steps is not None
        self.steps, self._settings, self._processes = settings.steps, settings, processes
        self._stream = text.opened(processes.rank, processes.size, settings.hold_out)
        self._rounds = self._stream.rounds
        batch, self.held_out = settings.batch, []
        if settings.hold_out:
            examples = text.held_out(settings.hold_out)
            rows = list(range(len(examples)))
            self.held_out = [Part(examples[i : i + batch], rows[i : i + batch]) for i in range(0, len(rows), batch)]

    def parts(self, step: int) -> list[Part]:
        batch, parts = self._settings.batch, self._settings.accumulate * self._processes.size
        numbers = self._processes.share(range(step * parts, (step + 1) * parts), step * parts)
        rows = [list(range(part * batch, (part + 1) * batch)) for part in numbers]
        return [Part(self._stream.examples(part_rows), part_rows) for part_rows in rows]

    def weights(self, step: int, parts: Sequence[Part], count: Count) -> list[tuple[float, ...]]:
        gathered = self._processes.gather([[*count(part)] for part in parts])
        counts = [part_counts for process_counts in gathered for part_counts in process_counts]
        start = self._processes.rank * len(parts)
        return part_weights(counts, [self._settings.batch] * len(counts))[start : start + len(parts)]

    def state(self) -> tuple[list[Any], dict[str, Tensor]]:
        states = self._processes.gather(self._stream.state())
        texts = [(f"{STREAM}{rank}/{i}", text) for rank, state in enumerate(states) for i, text in enumerate(state)]
        return states, {name: text.pop("unused") for name, text in texts}

    def resume(self, record: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        rank = self._processes.rank
        unused = [{"unused": tensors[f"{STREAM}{rank}/{i}"]} for i in range(len(record[rank]))]
        self._stream.resume([{**text, **part} for text, part in zip(record[rank], unused, strict=True)])
        self._rounds = self._stream.rounds

    def notes(self) -> list[str]:
        before, self._rounds = self._rounds, self._stream.rounds
        ended = [name for name, rounds in self._rounds.items() if rounds > before[name]]
        return [f"the stream {name} has ended and begins again: its sequences repeat" for name in ended]

    def uses(self) -> list[Any]:
        return [use for uses in self._processes.gather(self._stream.uses()) for use in uses]


def feed_of(
    examples: Examples | TrainingText | Int[Tensor, "examples ..."], settings: LoopOptions, processes: Processes
) -> Feed:
    """Return what a training reads in each step."""
    if isinstance(examples, TrainingText):
        return StreamFeed(examples, settings, processes)
    return FixedFeed(examples, settings, processes)
