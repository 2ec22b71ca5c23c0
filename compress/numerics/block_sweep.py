"""The sweep over blocks of columns that are rounded together, and its refinement (BlockLDLQ, QuIP#, Tseng 2024).

The error of a layer is tr(E H E^T), with E the error of its weight and H the Hessian of its inputs. A block code rounds
the weights of `columns` columns and of `rows` rows at once; each row has a scale.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.linalg import solve_positive


class BlockCode(Protocol):
    """Codes of `size` bytes for blocks of `rows` x `columns` weights of a variance near 1."""

    rows: int
    columns: int
    size: int

    def encode(self, values: Float[Tensor, "out columns"]) -> Int[Tensor, "blocks size"]:
        """The codes (uint8) of a small squared error; one for each `rows` rows."""
        ...

    def decode(self, codes: Int[Tensor, "blocks size"]) -> Float[Tensor, "out columns"]:
        """The values of codes."""
        ...


class BlockSweep:
    """The rounded weight of a layer. hessian: damped. scale: the first one of each row. dtype: of the stored scales."""

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        hessian: Float[Tensor, "in in"],
        code: BlockCode,
        scale: Float[Tensor, " out"],
        dtype: torch.dtype,
    ) -> None:
        self.weight, self.hessian, self.code, self.dtype = weight, hessian, code, dtype
        self.scale = self._stored(scale)
        blocks = weight.shape[0] // code.rows, weight.shape[1] // code.columns
        self.codes = torch.zeros(*blocks, code.size, dtype=torch.uint8, device=weight.device)
        self.found = torch.zeros_like(weight)

    def _stored(self, scale: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        return scale.clamp(min=torch.finfo(torch.bfloat16).tiny).to(self.dtype).float()

    def _round(self, values: Float[Tensor, "out columns"]) -> tuple[Tensor, Tensor]:
        """The codes of some columns, and their values."""
        codes = self.code.encode(values / self.scale[:, None])
        return codes, self.code.decode(codes) * self.scale[:, None]

    def sweep(self, factor: Float[Tensor, "in in"]) -> None:
        """Round all blocks from left to right; later ones compensate the error of a block. factor: U, inv(H) = U^T U.

        QuIP#, section 4.2: what it rounds in each block is the same as with the block LDL decomposition of H.
        """
        work, step = self.weight.clone(), self.code.columns
        for at in range(0, work.shape[1], step):
            here = slice(at, at + step)
            codes, values = self._round(work[:, here])
            self.codes[:, at // step], self.found[:, here] = codes, values
            if at + step < work.shape[1]:
                error = torch.linalg.solve_triangular(
                    factor[here, here], work[:, here] - values, upper=True, left=False
                )
                work[:, at + step :] -= error @ factor[here, at + step :]

    def fit_scales(self) -> None:
        """The scale of each row with the least error for the present codes."""
        plain = self.found / self.scale[:, None]
        weighed = plain @ self.hessian
        size = (weighed * plain).sum(1)
        found = (weighed * self.weight).sum(1) / size
        fits = found.isfinite() & (found > 0) & (size > 0)
        self.scale = torch.where(fits, self._stored(found.clamp(min=0)), self.scale)
        self.found = plain * self.scale[:, None]

    def descend(self) -> None:
        """Choose each block again, given all others, and keep the choice where the error falls."""
        slope = (self.weight - self.found) @ self.hessian  # half of the negative gradient
        step = self.code.columns
        for at in range(0, self.weight.shape[1], step):
            here = slice(at, at + step)
            own = self.hessian[here, here]
            now = self.found[:, here]
            steps, solved = solve_positive(own, slope[:, here].T)
            best = now + torch.where(solved, steps.T, 0)
            codes, values = self._round(best)
            move = values - now
            # the error changes by d H d - 2 d (W - Q) H
            change = ((move @ own) * move).sum(1) - 2 * (move * slope[:, here]).sum(1)
            falls = change.view(-1, self.code.rows).sum(1) < 0
            move = move * falls.repeat_interleave(self.code.rows)[:, None]
            self.codes[:, at // step] = torch.where(falls[:, None], codes, self.codes[:, at // step])
            self.found[:, here] = now + move
            slope -= move @ self.hessian[here]
