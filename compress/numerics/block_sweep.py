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
        """Return codes (uint8) of a small squared error; one for each `rows` rows."""
        ...

    def decode(self, codes: Int[Tensor, "blocks size"]) -> Float[Tensor, "out columns"]:
        """Return the values of codes."""
        ...


class BlockSweep:
    """The rounded weight of a layer.

    Args:
        weight: the weight.
        hessian: damped.
        code: the block code.
        scale: initial scale of each row.
        dtype: dtype of the stored scales.

    Attributes:
        codes: the codes of all blocks.
        rounded: the dequantized weight.
    """

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
        self.rounded = torch.zeros_like(weight)

    def _stored(self, scale: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        return scale.clamp(min=torch.finfo(torch.bfloat16).tiny).to(self.dtype).float()

    def _round(self, values: Float[Tensor, "out columns"]) -> tuple[Tensor, Tensor]:
        """Return the codes of a block of columns, and their values."""
        codes = self.code.encode(values / self.scale[:, None])
        return codes, self.code.decode(codes) * self.scale[:, None]

    def sweep(self, factor: Float[Tensor, "in in"]) -> None:
        """Round all blocks from left to right; later blocks compensate the error of a block.

        QuIP#, section 4.2: what it rounds in each block is the same as with the block LDL decomposition of H.

        Args:
            factor: U of inv(H) = U^T U.
        """
        work, step = self.weight.clone(), self.code.columns
        for column in range(0, work.shape[1], step):
            columns = slice(column, column + step)
            codes, values = self._round(work[:, columns])
            self.codes[:, column // step], self.rounded[:, columns] = codes, values
            if column + step < work.shape[1]:
                error = torch.linalg.solve_triangular(
                    factor[columns, columns], work[:, columns] - values, upper=True, left=False
                )
                work[:, column + step :] -= error @ factor[columns, column + step :]

    def fit_scales(self) -> None:
        """Fit the scale of each row to the current codes."""
        plain = self.rounded / self.scale[:, None]
        weighted = plain @ self.hessian
        size = (weighted * plain).sum(1)
        best_scale = (weighted * self.weight).sum(1) / size
        is_valid = best_scale.isfinite() & (best_scale > 0) & (size > 0)
        self.scale = torch.where(is_valid, self._stored(best_scale.clamp(min=0)), self.scale)
        self.rounded = plain * self.scale[:, None]

    def descend(self) -> None:
        """Choose each block again, given all others, and keep the choice if the error decreases."""
        slope = (self.weight - self.rounded) @ self.hessian  # half of the negative gradient
        step = self.code.columns
        for column in range(0, self.weight.shape[1], step):
            columns = slice(column, column + step)
            block = self.hessian[columns, columns]
            current = self.rounded[:, columns]
            steps, is_solved = solve_positive(block, slope[:, columns].T)
            best = current + torch.where(is_solved, steps.T, 0)
            codes, values = self._round(best)
            move = values - current
            # the error changes by d H d - 2 d (W - Q) H
            change = ((move @ block) * move).sum(1) - 2 * (move * slope[:, columns]).sum(1)
            is_better = change.view(-1, self.code.rows).sum(1) < 0
            move = move * is_better.repeat_interleave(self.code.rows)[:, None]
            self.codes[:, column // step] = torch.where(is_better[:, None], codes, self.codes[:, column // step])
            self.rounded[:, columns] = current + move
            slope -= move @ self.hessian[columns]
