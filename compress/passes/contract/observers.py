"""Observers: statistics of a layer's inputs. Layers that read the same tensor share one observer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.errors import NumericError, TargetError
from compress.numerics.linalg import Regularization, damped_, inverse_factor, shrink_
from compress.passes.contract.facts import Log
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.processes import Processes
from compress.roofline.work import Work

SLAB = 256  # columns of X^T X per matrix product; from about four slabs on this saves nearly half the work
CHUNK = 256  # rows per product in float32; the sum over chunks is float64
GPU_SLAB, GPU_CHUNK = 1024, 4096  # the same on a GPU, where small products take the time of their launches


class Observer(ABC):
    """Statistics of the rows [tokens, width] that reach a layer, accumulated batch by batch in float32.

    tokens: the number of rows seen.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.device = device
        self.tokens = 0

    def update(self, rows: Float[Tensor, "tokens in"]) -> None:
        """Add the inputs of one batch."""
        if rows.shape[0]:  # an expert may be called without any token
            self.tokens += rows.shape[0]
            self.gather(rows.float())

    @abstractmethod
    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        """Add rows to the statistics."""

    def merge(self, processes: Processes) -> None:
        """Combine the statistics with those that other processes have gathered from their sequences."""
        if processes.size > 1:
            self.tokens = sum(processes.gather(self.tokens))
            self.combine(processes)

    def combine(self, processes: Processes) -> None:
        """Combine everything but `tokens` with the other processes: sums, maxima, ...

        Raises:
            TargetError: for an observer that does not define it.
        """
        raise TargetError(
            f"{type(self).__name__}: does not say how statistics of several processes are combined; define combine, or "
            "run in one process"
        )

    @classmethod
    @abstractmethod
    def memory_bytes(cls, width: int) -> int:
        """Memory of the observer, with its cached results, for inputs of this width."""

    @classmethod
    def block_bytes(cls, size: ProblemSize) -> int:
        """Return the memory of the observers of all inputs of a block, and of the rows sampled with them.

        One of them at a time has cached results.
        """
        cached = [cls.cached_bytes(width) for width in size.inputs]
        statistics = sum(map(cls.memory_bytes, size.inputs)) - sum(cached) + max(cached, default=0)
        return statistics + size.itemsize * size.sampled

    @classmethod
    def cached_bytes(cls, width: int) -> int:
        """Memory of the cached results alone, which only the input whose layers are being solved has."""
        return 0

    @classmethod
    def work(cls, width: int, tokens: float) -> Work:
        """Count the work of observing so many tokens of this width; by default each number is read twice."""
        return Work(elements=2 * tokens * width)


class Nothing(Observer):
    """The observer of passes that need no data."""

    @classmethod
    def memory_bytes(cls, width: int) -> int:
        return 0

    @classmethod
    def work(cls, width: int, tokens: float) -> Work:
        return Work()

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        return

    def merge(self, processes: Processes) -> None:
        return


def without_data(statistics: Observer) -> None:
    """Feed substitute inputs to an observer without tokens: one token along each axis, uncorrelated, of equal size."""
    statistics.update(torch.eye(statistics.width, device=statistics.device))


class InputNorm(Observer):
    """The L2 norm of every input channel over all tokens, [in]."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self._squares = torch.zeros(width, dtype=torch.float64, device=device)

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        self._squares += rows.square().sum(0)  # float32 per batch takes a third of the time; the sum is float64

    def combine(self, processes: Processes) -> None:
        self._squares = processes.sum(self._squares)

    @classmethod
    def memory_bytes(cls, width: int) -> int:
        return 8 * width  # in float64

    @property
    def norm(self) -> Float[Tensor, " in"]:
        """The L2 norm per channel."""
        return self._squares.sqrt().float()


class InputAbsMax(Observer):
    """The largest magnitude of every input channel, [in]."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self.absmax = torch.zeros(width, device=device)

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        self.absmax = torch.maximum(self.absmax, rows.abs().amax(0))

    def combine(self, processes: Processes) -> None:
        self.absmax = processes.maximum(self.absmax)

    @classmethod
    def memory_bytes(cls, width: int) -> int:
        return 4 * width

    def divide(self, scale: Float[Tensor, " in"]) -> None:
        """Divide past inputs by `scale`, because the inputs are divided by it from now on."""
        self.absmax = self.absmax / scale


class InputRange(InputAbsMax):
    """The smallest, the largest and the largest absolute value of every input channel, [in] each; 0 without tokens."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self._low = torch.full((width,), torch.inf, device=device)
        self._high = torch.full((width,), -torch.inf, device=device)

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        super().gather(rows)
        low, high = rows.aminmax(dim=0)
        self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)

    def combine(self, processes: Processes) -> None:
        super().combine(processes)
        self._low, self._high = -processes.maximum(-self._low), processes.maximum(self._high)

    @classmethod
    def memory_bytes(cls, width: int) -> int:
        return 3 * 4 * width

    @property
    def low(self) -> Float[Tensor, " in"]:
        """The smallest value per channel."""
        return self._low if self.tokens else torch.zeros_like(self._low)

    @property
    def high(self) -> Float[Tensor, " in"]:
        """The largest value per channel."""
        return self._high if self.tokens else torch.zeros_like(self._high)

    def divide(self, scale: Float[Tensor, " in"]) -> None:
        super().divide(scale)
        self._low, self._high = self._low / scale, self._high / scale

    def subtract(self, shift: Float[Tensor, " in"]) -> None:
        """Subtract `shift` from past inputs, because the inputs are shifted from now on."""
        self._low, self._high = self._low - shift, self._high - shift
        self.absmax = torch.maximum(-self._low, self._high).clamp(min=0)  # 0 without tokens


class OutlierFrequency(Observer):
    """The fraction of tokens, per input channel, in which the magnitude reaches `threshold`, [in]."""

    def __init__(self, width: int, device: torch.device, threshold: float) -> None:
        super().__init__(width, device)
        self.threshold = threshold
        self._count = torch.zeros(width, dtype=torch.int64, device=device)

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        self._count += (rows.abs() >= self.threshold).sum(0)

    def combine(self, processes: Processes) -> None:
        self._count = processes.sum(self._count)

    @classmethod
    def memory_bytes(cls, width: int) -> int:
        return 8 * width  # int64 counts

    @property
    def frequency(self) -> Float[Tensor, " in"]:
        """The fraction per channel, from 0 to 1."""
        return self._count / max(self.tokens, 1)


def _slabs(width: int, step: int = SLAB) -> list[tuple[int, int]]:
    """The sizes of the slabs of rows that hold the upper triangle of a symmetric matrix, each from its diagonal on."""
    return [(min(step, width - start), width - start) for start in range(0, width, step)]


class Gram(Observer):
    """The Hessian 2/n X^T X over all n tokens, [in, in] (GPTQ, equation 2, divided by n to make it comparable).

    The sum hardly depends on the order of sequences nor on batches, because products of a fixed number of rows are
    added in float64. GPTQ amplifies the last bits of the Hessian: with sums in float32, the order of sequences changes
    the perplexity of SmolLM2-135M by 1.6% (eval/LOG.md).
    """

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self._step, self._chunk = (GPU_SLAB, GPU_CHUNK) if device.type == "cuda" else (SLAB, CHUNK)
        sizes = _slabs(width, self._step)
        self._slabs = [torch.zeros(size, dtype=torch.float64, device=device) for size in sizes]
        self._factors: dict[tuple[Regularization, bytes], tuple[Tensor, float]] = {}

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        for chunk in rows.split(self._chunk):
            for n, slab in enumerate(self._slabs):
                start = n * self._step
                slab += chunk[:, start : start + self._step].T @ chunk[:, start:]
        self._factors.clear()

    def combine(self, processes: Processes) -> None:
        self._slabs = processes.sums(self._slabs)
        self._factors.clear()

    @classmethod
    def memory_bytes(cls, width: int) -> int:
        return sum(8 * rows * columns for rows, columns in _slabs(width)) + cls.cached_bytes(width)

    @classmethod
    def cached_bytes(cls, width: int) -> int:
        return 4 * width * width  # the factor

    @classmethod
    def work(cls, width: int, tokens: float) -> Work:
        size = sum(rows * columns for rows, columns in _slabs(width))
        # products of each chunk in float32, added in float64
        return Work(statistics=2 * tokens * size, elements=2 * math.ceil(tokens / CHUNK) * size)

    @property
    def _squares(self) -> Float[Tensor, " in"]:
        """The sums of squares of the channels, in float64."""
        return torch.cat([slab.diagonal() for slab in self._slabs])

    @property
    def diagonal(self) -> Float[Tensor, " in"]:
        """The diagonal of the Hessian."""
        return (self._squares * (2 / max(self.tokens, 1))).float()

    @property
    def norm(self) -> Float[Tensor, " in"]:
        """The L2 norm per channel over all tokens, as that of `InputNorm`."""
        return self._squares.sqrt().float()

    @property
    def hessian(self) -> Float[Tensor, "in in"]:
        """2/n X^T X."""
        hessian = torch.empty(self.width, self.width, device=self.device)
        for n, slab in enumerate(self._slabs):
            start, stop = n * self._step, n * self._step + len(slab)
            near, far = slab[:, : len(slab)], slab[:, len(slab) :]
            hessian[start:stop, start:stop] = near.triu() + near.triu(1).T
            hessian[start:stop, stop:] = far
            hessian[stop:, start:stop] = far.T
        return hessian.mul_(2 / max(self.tokens, 1))

    def shrunk(self, regularization: Regularization) -> Float[Tensor, "in in"]:
        """Return the Hessian with shrunk correlations, without damping."""
        return shrink_(self.hessian, regularization.shrinkage)

    def factor(
        self, regularization: Regularization, order: Tensor | None = None
    ) -> tuple[Float[Tensor, "in in"], float, int]:
        """(U, damping used, dead channels): `linalg.inverse_factor` of the shrunk Hessian with the columns in `order`.

        Dead channels (always zero) neither give nor receive compensation. The factor is cached for other
        layers that read the same input.
        """
        key = (regularization, b"" if order is None else order.cpu().numpy().tobytes())
        dead = self.diagonal == 0
        if key not in self._factors:
            hessian = self.shrunk(regularization)
            if bool(dead.all()):
                hessian.fill_diagonal_(1)
            if order is not None:
                hessian = hessian[order]
                for rows in hessian.split(self._step):  # in place: a copy would double the memory
                    rows.copy_(rows[:, order])
            self._factors = {key: inverse_factor(hessian, regularization.damping)}
        return (*self._factors[key], int(dead.sum()))

    def damped(self, regularization: Regularization, order: Tensor | None = None) -> Float[Tensor, "in in"]:
        """Return the Hessian that `factor` inverts, in the original order, with the damping of `order`."""
        return damped_(self.shrunk(regularization), self.factor(regularization, order)[1])

    def factor_of(
        self, name: str, log: Log, regularization: Regularization, order: Tensor | None = None
    ) -> Float[Tensor, "in in"]:
        """U of `factor` for the layer `name`; journals a raised damping and dead channels.

        Raises:
            NumericError: when no token reached the layer, or as `linalg.inverse_factor` does.
        """
        if self.tokens == 0:
            raise NumericError(f"{name}: no calibration token reached this layer")
        factor, used, dead = self.factor(regularization, order)
        if used != regularization.damping:
            log("fallback", "damping raised until the Hessian was positive definite", damping=used)
        if dead:
            log("note", "input channels were always zero; their errors are not compensated", channels=dead)
        return factor


class UnitGram(Gram):
    """Gram of the rows normalized to unit length: the relative errors of all tokens count equally."""

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        super().gather(nn.functional.normalize(rows))  # a row of zeros stays zero


class CrossGram(Gram):
    """Gram, and cross: 2/n (X~ - X)^T X, [in, in], where X~ are the same rows in the uncompressed model.

    Attributes:
        alone: the statistics of X without X~.
    """

    alone: ClassVar[type[Gram]] = Gram

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self._cross = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._shift: tuple[Regularization, Tensor] | None = None

    def compare(self, rows: Float[Tensor, "tokens in"], reference: Float[Tensor, "tokens in"]) -> None:
        """Add the inputs of one batch and those of the uncompressed model, row by row."""
        self.update(rows)
        if rows.shape[0]:
            parts = rows.float().split(self._chunk), reference.float().split(self._chunk)
            for chunk, reference_chunk in zip(*parts, strict=True):
                self._cross += (reference_chunk - chunk).T @ chunk
            self._shift = None

    def combine(self, processes: Processes) -> None:
        super().combine(processes)
        self._cross, self._shift = processes.sum(self._cross), None

    @classmethod
    def memory_bytes(cls, width: int) -> int:
        return super().memory_bytes(width) + 8 * width * width  # the sum

    @classmethod
    def cached_bytes(cls, width: int) -> int:
        return super().cached_bytes(width) + 4 * width * width  # the shift

    @classmethod
    def work(cls, width: int, tokens: float) -> Work:
        size = width * width
        cross = Work(statistics=2 * tokens * size, elements=2 * math.ceil(tokens / CHUNK) * size)
        return super().work(width, tokens) + cross

    @property
    def cross(self) -> Float[Tensor, "in in"]:
        """2/n (X~ - X)^T X."""
        return (self._cross * (2 / max(self.tokens, 1))).float()

    def shift(self, regularization: Regularization, order: Tensor | None = None) -> Float[Tensor, "in in"]:
        """cross inv(H), with H regularized as in `factor`: W + W shift is the least-squares fit of W X~ from X.

        Args:
            order: the order that `factor` will use, so that one factorization suffices. The result is in the original
                order of the columns. It is cached for other layers that read the same input.
        """
        if self._shift is None or self._shift[0] != regularization:
            factor, _, _ = self.factor(regularization, order)
            cross = self.cross if order is None else self.cross[:, order]
            shift = cross @ factor.T @ factor
            self._shift = regularization, shift if order is None else shift[:, order.argsort()]
        return self._shift[1]


class UnitCrossGram(CrossGram):
    """CrossGram of rows that are divided by the length of X, both in X and in X~: as `UnitGram` does."""

    alone: ClassVar[type[Gram]] = UnitGram

    def compare(self, rows: Float[Tensor, "tokens in"], reference: Float[Tensor, "tokens in"]) -> None:
        lengths = rows.float().norm(dim=-1, keepdim=True)
        scale = torch.where(lengths > 0, 1 / lengths, 0)  # a row of zeros stays zero
        super().compare(rows.float() * scale, reference.float() * scale)
