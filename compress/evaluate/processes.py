"""The processes of a launcher, among which the requests of an evaluation are divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed
from accelerate import PartialState

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those of the launcher; alone without a launcher."""

    rank: int = 0
    size: int = 1

    @classmethod
    def launched(cls, cpu: bool) -> Processes:
        """The processes that `accelerate launch` or torchrun started. cpu: computed on the CPU."""
        state = PartialState(cpu=cpu)
        return cls(state.process_index, state.num_processes)

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def share(self, items: list[T]) -> list[T]:
        """The items of this process; every item belongs to one process."""
        return items[self.rank :: self.size]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in every process."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found


ALONE = Processes()
"""One process without a launcher."""
