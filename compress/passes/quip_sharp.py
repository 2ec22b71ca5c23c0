"""QuIP#: weights rotated by Hadamard matrices, and rounded to points of the lattice E8 run by run (Tseng 2024)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.api.facts import Fact, LayerFacts
from compress.api.layers import Layer, Solution
from compress.api.memory import ProblemSize
from compress.api.observers import Gram
from compress.errors import NumericError
from compress.families.compensation import HessianPass
from compress.numerics.hadamard import exists, largest_block
from compress.numerics.linalg import damped, factor_bytes, inverse_factor
from compress.numerics.quant.lattice import CHUNK, GAUSSIAN, LENGTH, count_bytes, decode, nearest
from compress.weights.lattice import LatticePart, LatticeScheme, rotated_rows
from compress.weights.layer import LayerScheme
from compress.weights.transforms.hadamard import Hadamard, HadamardScheme

SMALLEST_BLOCK = 16  # of a Hadamard matrix that does not fit the whole width: a smaller one spreads little


class QuipSharp(HessianPass):
    """Rotate weights and inputs by randomized Hadamard matrices, and round runs of eight weights to lattice points.

    The rotated weight has no outliers: it is nearly Gaussian (section 3), so one codebook suits all layers. That of 2
    bits is E8P, 2^16 points in 8 dimensions (section 4.1); for 3 and 4 bits a second codebook rounds what the first one
    leaves (section 4.3). Runs are rounded from left to right, and later runs compensate each error (BlockLDLQ, section
    4.2). `refine` then chooses each run again, given all others, and the scale of each row by least squares; the paper
    has one scale per layer, and no refinement. rotate: 'both' also rotates the outputs, as the paper does; with
    'inputs' distill and lkd can learn the scales of the rows.
    """

    use_for: ClassVar[str] = "2 bits (2.04 with scales and signs), without any book to store; follow it by distill."
    not_for: ClassVar[str] = (
        "The fastest decoding: a point takes longer to decode than integers, and inputs are rotated when a layer runs."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2402.04396"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "masked"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    bits: Literal[2, 3, 4] = Field(default=2, description="bits per weight: E8P; E8P and E8; E8P twice")
    rotate: Literal["both", "inputs"] = Field(
        default="inputs", description="sides of the weight that are rotated; with 'both' scales cannot be learned"
    )
    refine: int = Field(
        default=2, ge=0, le=100, description="rounds after the sweep in which scales and runs are chosen again"
    )
    seed: int = Field(default=0, ge=0, description="seed of the random signs")

    def _rotated(self, rows: int) -> int | None:
        return largest_block(rows) if self.rotate == "both" else None

    def becomes(self, before: LayerScheme) -> LayerScheme:
        rows, width = before.shape
        found = before.with_parts(LatticeScheme(self.bits, self._rotated(rows)))
        return found.with_transform(HadamardScheme(largest_block(width)))

    def check(self, layer: LayerFacts) -> str | None:
        reason = super().check(layer)
        sides = {"inputs": layer.shape[1]} | ({"outputs": layer.shape[0]} if self.rotate == "both" else {})
        for side, width in sides.items():
            if reason is None and not exists(width) and largest_block(width) < SMALLEST_BLOCK:
                reason = f"no Hadamard matrix of order {SMALLEST_BLOCK} or more divides its {width} {side}; ignore it"
        return reason

    def memory(self, size: ProblemSize) -> int:
        distances = 2 * 4 * CHUNK * LENGTH * 256  # of some runs to all vectors of magnitudes
        return 2 * super().memory(size) + 2 * factor_bytes(size.shape[1]) + distances

    def solve(self, weight: Float[Tensor, "out in"], seen: Gram, layer: Layer) -> Solution:
        if seen.tokens == 0:
            raise NumericError(f"{layer.name}: no calibration token reached this layer")
        rows, width = weight.shape
        turn = Hadamard.of(largest_block(width), self.seed, (rows, width)).to(weight.device)
        part = LatticePart.of(
            torch.zeros(rows, width // LENGTH, count_bytes(self.bits), dtype=torch.uint8, device=weight.device),
            torch.ones(rows, device=weight.device), self.bits, self._rotated(rows), self.seed + 1,
        )  # fmt: skip
        turned = turn(weight.float())
        if part.signs is not None:
            turned = rotated_rows(turned, part.signs, part.scheme.rotated)
        hessian = turn(turn(seen.hessian).T.contiguous())
        factor, used = inverse_factor(hessian, self.damping)
        if used != self.damping:
            layer.log("fallback", "damping raised until the Hessian was positive definite", damping=used)
        runs = _Runs(turned, damped(hessian, used), self.bits, layer.storage)
        runs.sweep(factor)
        for _ in range(self.refine):
            runs.fit_scales()
            runs.descend()
        held: dict[str, Any] = {"codes": runs.codes.flatten(1), "scale": runs.scale.to(layer.storage)}
        found = LatticePart(part.scheme, (rows, width), {**held, "signs": part.signs})
        return Solution([found], transforms=(turn,))


class _Runs:
    """The rounded weight of a layer. weight: rotated. hessian: rotated and damped. dtype: of the stored scales."""

    def __init__(self, weight: Tensor, hessian: Tensor, bits: int, dtype: torch.dtype) -> None:
        self.weight, self.hessian, self.bits, self.dtype = weight, hessian, bits, dtype
        rows, width = weight.shape
        self.scale = self._stored(weight.square().mean(1).sqrt() * GAUSSIAN[bits])
        size = width // LENGTH
        self.codes = torch.zeros(rows, size, count_bytes(bits), dtype=torch.uint8, device=weight.device)
        self.found = torch.zeros_like(weight)

    def _stored(self, scale: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        return scale.clamp(min=torch.finfo(torch.bfloat16).tiny).to(self.dtype).float()

    def _round(self, values: Float[Tensor, "out 8"]) -> tuple[Tensor, Tensor]:
        """The codes of the nearest points of a run, and their values."""
        codes = nearest(values / self.scale[:, None], self.bits)
        return codes, decode(codes, self.bits) * self.scale[:, None]

    def sweep(self, factor: Float[Tensor, "in in"]) -> None:
        """Round all runs from left to right; later runs compensate the error of a run. factor: U of inv(H) = U^T U."""
        work = self.weight.clone()
        for at in range(0, work.shape[1], LENGTH):
            here = slice(at, at + LENGTH)
            codes, values = self._round(work[:, here])
            self.codes[:, at // LENGTH], self.found[:, here] = codes, values
            if at + LENGTH < work.shape[1]:
                error = torch.linalg.solve_triangular(
                    factor[here, here], work[:, here] - values, upper=True, left=False
                )
                work[:, at + LENGTH :] -= error @ factor[here, at + LENGTH :]

    def fit_scales(self) -> None:
        """The scale of each row with the least error for the present points."""
        plain = self.found / self.scale[:, None]
        weighed = plain @ self.hessian
        size = (weighed * plain).sum(1)
        found = (weighed * self.weight).sum(1) / size
        fits = found.isfinite() & (found > 0) & (size > 0)
        self.scale = torch.where(fits, self._stored(found.clamp(min=0)), self.scale)
        self.found = plain * self.scale[:, None]

    def descend(self) -> None:
        """Choose each run again, given all others, and keep the choice in rows whose error falls."""
        slope = (self.weight - self.found) @ self.hessian  # half of the negative gradient
        for at in range(0, self.weight.shape[1], LENGTH):
            here = slice(at, at + LENGTH)
            own = self.hessian[here, here]
            now = self.found[:, here]
            best = now + torch.linalg.solve(own, slope[:, here].T).T
            codes, values = self._round(best)
            step = values - now
            # the error changes by d H d - 2 d (W - Q) H
            change = ((step @ own) * step).sum(1) - 2 * (step * slope[:, here]).sum(1)
            step = step * (change < 0)[:, None]
            self.codes[:, at // LENGTH] = torch.where((change < 0)[:, None], codes, self.codes[:, at // LENGTH])
            self.found[:, here] = now + step
            slope -= step @ self.hessian[here]
