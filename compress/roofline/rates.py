"""Rates: the processor seconds of each kind of work, fitted to measured runs, and what follows for other devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
import yaml
from scipy.optimize import nnls

from compress.roofline.devices import Device
from compress.roofline.work import KINDS, Work

TABLE = Path(__file__).with_name("rates.yaml")
OPERATIONS = ("products", "statistics", "factors", "updates")
"""Kinds of work that a device does at its rate of operations."""
NUMBERS = ("columns", "roundings", "scores", "elements", "installs")
"""Kinds of work that a device does at its bandwidth. The others, calls and files, are those of the host."""
UTILIZATION = 0.4
"""The most of a published rate of 16-bit products that is assumed: a model of 405B parameters was trained at 38 to 43%
(Dubey 2024, arXiv 2407.21783, table 4)."""
NUMBER = 4
"""Bytes of a number in float32."""
SIZE, COPIED, REPEATS = 1024, 1 << 24, 3
"""Rows and columns of the product, and numbers of the copy, with which the limits of a machine are measured."""


@dataclass(frozen=True)
class Rates:
    """Seconds of a processor for each unit of work.

    Attributes:
        seconds: by kind of work.
        operations: operations per second of the fastest product in float32, of one processor.
        bandwidth: bytes per second of a copy, read and written, of one processor.
        machine: the processor that was measured.
    """

    seconds: Mapping[str, float] = field(hash=False)
    operations: float
    bandwidth: float
    machine: str

    def of(self, work: Work) -> float:
        """Return the processor seconds of some work."""
        return sum(self.seconds[kind] * amount for kind, amount in work.amounts.items())

    def on(self, device: Device, itemsize: int) -> Rates:
        """Return the rates of a device: its published rates times the efficiency that was measured here.

        Products in 16 bits take at least the time of `UTILIZATION` of the published rate.

        Args:
            device: the device.
            itemsize: bytes of a number in the dtype of computation.
        """
        single = device.rates.get("float32", device.rate("float16"))
        slower = self.operations / single
        seconds = {kind: self.seconds[kind] * slower for kind in OPERATIONS}
        if itemsize <= 2:
            most = 1 / (UTILIZATION * device.rate("float16"))
            seconds["products"] = max(most, self.seconds["products"] * self.operations / device.rate("float16"))
        seconds |= {kind: self.seconds[kind] * self.bandwidth / device.bandwidth for kind in NUMBERS}
        unscaled = {kind: self.seconds[kind] for kind in KINDS if kind not in seconds}
        return Rates(seconds | unscaled, single, device.bandwidth, f"{device.name}, predicted")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "seconds": dict(self.seconds)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rates:
        """Read what `to_json` gives.

        Raises:
            KeyError: for a missing value.
            TypeError: for a value of another type.
        """
        seconds = {kind: float(values["seconds"][kind]) for kind in KINDS}
        return cls(seconds, float(values["operations"]), float(values["bandwidth"]), str(values["machine"]))


@cache
def reference_rates() -> Rates:
    """Return the rates that the package comes with, for machines that have not been measured."""
    return Rates.from_json(yaml.safe_load(TABLE.read_text("utf-8")))


def fitted_seconds(
    samples: Sequence[tuple[Work, float]], operations: float = math.inf, bandwidth: float = math.inf
) -> dict[str, float]:
    """Fit the seconds per unit of every kind of work to measured (work, seconds); relative errors count equally.

    No kind is faster than the limits of the machine: an operation per 1 / operations, a number of `NUMBER` bytes per
    NUMBER / bandwidth. Without them small runs do not tell kinds apart that grow together.

    Args:
        samples: the runs.
        operations: per second.
        bandwidth: bytes per second.
    """
    least: dict[str, float] = dict.fromkeys(OPERATIONS, 1 / operations)
    least |= dict.fromkeys(NUMBERS, NUMBER / bandwidth)
    lower = np.array([least.get(kind, 0.0) for kind in KINDS])
    amounts = np.array([list(work.amounts.values()) for work, _ in samples])
    seconds = np.array([taken for _, taken in samples])
    scale = np.where(amounts.max(0) > 0, amounts.max(0), 1.0)
    unexplained = 1 - (amounts @ lower) / seconds  # what the limits do not explain
    solution, _ = nnls(amounts / scale / seconds[:, None], unexplained)
    return dict(zip(KINDS, (lower + solution / scale).tolist(), strict=True))


def measured_limits() -> tuple[float, float]:
    """Measure the operations and the bytes per second of one processor, by processor time."""
    matrix, numbers = torch.randn(SIZE, SIZE), torch.zeros(COPIED)
    target = torch.empty_like(numbers)
    product, copy = [], []
    with torch.no_grad():
        for _ in range(REPEATS + 1):
            begin = process_time()
            torch.matmul(matrix, matrix)
            middle = process_time()
            target.copy_(numbers)
            product.append(middle - begin)
            copy.append(process_time() - middle)
    return 2 * SIZE**3 / min(product[1:]), 2 * numbers.nbytes / min(copy[1:])
