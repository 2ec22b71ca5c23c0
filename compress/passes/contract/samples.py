"""Samples of a layer's inputs."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import InputAbsMax
from compress.passes.contract.processes import Processes


class Sample:
    """A sample of input rows, evenly spaced, to measure how a rewrite changes a layer's output."""

    ROWS_PER_BATCH = 64
    ROWS = 512

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def update(self, rows: Float[Tensor, "tokens in"]) -> None:
        """Keep every n-th row, up to the limits."""
        room = min(self.ROWS_PER_BATCH, self.ROWS - sum(r.shape[0] for r in self._rows))
        if room > 0 and rows.shape[0]:
            self._rows.append(rows[:: -(-rows.shape[0] // room)].clone())

    def merge(self, processes: Processes) -> None:
        """Keep rows of all processes, evenly spaced, up to the limit."""
        if processes.size > 1 and (samples := processes.collect(self.rows)):
            rows = torch.cat(samples)
            self._rows = [rows[:: -(-rows.shape[0] // self.ROWS)].clone()]

    def divide(self, scale: Float[Tensor, " in"]) -> None:
        """Divide the columns of the kept rows."""
        self._rows = [rows / scale for rows in self._rows]

    @classmethod
    def memory_bytes(cls, width: int, itemsize: int, batches: int | None = None) -> int:
        """Return the largest memory of the sample in bytes, for inputs of this width.

        Args:
            itemsize: bytes per number.
            batches: number of calibration batches; None: any.
        """
        rows = cls.ROWS if batches is None else min(cls.ROWS, batches * cls.ROWS_PER_BATCH)
        return rows * width * itemsize

    @property
    def rows(self) -> Float[Tensor, "rows in"] | None:
        """The kept rows, or None when no token reached the layer."""
        return torch.cat(self._rows) if self._rows else None


class Rows(InputAbsMax):
    """The largest magnitudes, and rows: a `Sample` of the inputs, in float32."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self._sample = Sample()

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        super().gather(rows)
        self._sample.update(rows)

    def combine(self, processes: Processes) -> None:
        super().combine(processes)
        self._sample.merge(processes)

    def divide(self, scale: Float[Tensor, " in"]) -> None:
        super().divide(scale)
        self._sample.divide(scale)

    @classmethod
    def memory_bytes(cls, width: int) -> int:
        return super().memory_bytes(width) + Sample.memory_bytes(width, 4)

    @classmethod
    def block_bytes(cls, size: ProblemSize) -> int:
        return InputAbsMax.block_bytes(size) + 4 * size.sampled

    @property
    def rows(self) -> Float[Tensor, "rows in"] | None:
        """The kept rows, [up to Sample.ROWS, in], or None when no token reached the layer."""
        return self._sample.rows
