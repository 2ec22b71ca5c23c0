"""What a pass gathers from the inputs of a layer. Layers that read the same tensor share one observer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from compress.numerics.linalg import inverse_factor


class Observer(ABC):
    """Statistics of the rows [tokens, width] that reach a layer, gathered batch by batch in float32.

    tokens: how many rows were seen.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.device = device
        self.tokens = 0

    def update(self, rows: Float[Tensor, "tokens in"]) -> None:
        """Take in the inputs of one batch."""
        if rows.shape[0]:  # an expert may be called with no token at all
            self.tokens += rows.shape[0]
            self.gather(rows.float())

    @abstractmethod
    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        """Add rows to the statistics."""


class Nothing(Observer):
    """For passes that need no data."""

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        return


class InputNorm(Observer):
    """norm: the L2 norm of every input channel over all tokens, [in]."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self._squares = torch.zeros(width, dtype=torch.float64, device=device)

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        self._squares += rows.square().sum(0, dtype=torch.float64)

    @property
    def norm(self) -> Float[Tensor, " in"]:
        """L2 norm per channel."""
        return self._squares.sqrt().float()


class InputAbsMax(Observer):
    """absmax: the largest magnitude of every input channel, [in]."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self.absmax = torch.zeros(width, device=device)

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        self.absmax = torch.maximum(self.absmax, rows.abs().amax(0))


class OutlierShare(Observer):
    """share: of all tokens, per input channel, those in which its magnitude reaches `threshold`, [in]."""

    def __init__(self, width: int, device: torch.device, threshold: float) -> None:
        super().__init__(width, device)
        self.threshold = threshold
        self._count = torch.zeros(width, dtype=torch.int64, device=device)

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        self._count += (rows.abs() >= self.threshold).sum(0)

    @property
    def share(self) -> Float[Tensor, " in"]:
        """Between 0 and 1 per channel."""
        return self._count / max(self.tokens, 1)


class Gram(Observer):
    """hessian: 2/n X^T X over all n tokens, [in, in] (GPTQ, equation 2, per token so that its size means something)."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self._sum = torch.zeros(width, width, device=device)
        self._factors: dict[tuple[float, bytes], tuple[Tensor, float]] = {}

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        self._sum.addmm_(rows.T, rows)
        self._factors.clear()

    @property
    def hessian(self) -> Float[Tensor, "in in"]:
        """2/n X^T X."""
        return self._sum * (2 / max(self.tokens, 1))

    def factor(self, damping: float, order: Tensor | None = None) -> tuple[Float[Tensor, "in in"], float, int]:
        """(U, damping used, dead channels): `linalg.inverse_factor` with the columns in `order`.

        Channels that were always zero get a 1 on the diagonal, so that they neither give nor take. Kept for the
        other layers that read the same input.
        """
        key = (damping, b"" if order is None else order.cpu().numpy().tobytes())
        hessian = self.hessian
        dead = hessian.diagonal() == 0
        if key not in self._factors:
            hessian.diagonal()[dead] = 1
            if order is not None:
                hessian = hessian[order][:, order]
            self._factors = {key: inverse_factor(hessian, damping)}
        return (*self._factors[key], int(dead.sum()))


class Sample:
    """A few input rows, evenly spaced, kept to measure what a rewrite does to a layer's output."""

    ROWS_PER_BATCH = 64
    ROWS = 512

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def update(self, rows: Float[Tensor, "tokens in"]) -> None:
        """Keep every n-th row, as long as there is room."""
        room = min(self.ROWS_PER_BATCH, self.ROWS - sum(r.shape[0] for r in self._rows))
        if room > 0 and rows.shape[0]:
            self._rows.append(rows[:: -(-rows.shape[0] // room)].clone())

    @property
    def rows(self) -> Float[Tensor, "rows in"] | None:
        """The rows kept, or None when no token came by."""
        return torch.cat(self._rows) if self._rows else None


class Rows(Observer):
    """rows: a `Sample` of the inputs, in float32."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self._sample = Sample()

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        self._sample.update(rows)

    @property
    def rows(self) -> Float[Tensor, "rows in"] | None:
        """[up to Sample.ROWS, in], or None when no token came by."""
        return self._sample.rows
