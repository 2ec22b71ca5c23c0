"""Passes that rotate a weight by randomized Hadamard matrices, and round it by a sweep over blocks (QuIP#)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.errors import NumericError
from compress.layers.base import COMPONENTS, WeightPart
from compress.layers.parts.scaled_rows import ScaledRowsScheme, rotated_rows
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.hadamard import Hadamard, HadamardScheme
from compress.numerics.block_sweep import BlockCode, BlockSweep
from compress.numerics.hadamard import exists, largest_block, signs_of
from compress.numerics.linalg import damped, factor_bytes, inverse_factor
from compress.passes.contract.facts import Effects, Fact
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.compensation import CompensatingPass

SMALLEST_BLOCK = 16  # of a Hadamard matrix that does not fit the whole width: a smaller one spreads little


class GaussianCode(NamedTuple):
    """A code of blocks of Gaussian weights.

    Attributes:
        scale: that of the least squared error for weights of variance 1.
        tensors: what the part stores besides codes, scales and signs.
    """

    blocks: BlockCode
    scale: float
    tensors: dict[str, Tensor]


class RotatedPass(CompensatingPass):
    """A layer pass that rounds a rotated weight. It has no outliers: it is nearly Gaussian (QuIP#, arXiv 2402.04396,
    section 3), so one code suits all layers. Later blocks compensate each error (BlockLDLQ, section 4.2)."""

    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "masked"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    rotate: Literal["both", "inputs"] = Field(
        default="inputs", description="sides of the weight that are rotated; with 'both' scales cannot be learned"
    )
    seed: int = Field(default=0, ge=0, description="seed of the random signs")

    @abstractmethod
    def scheme(self, rotated: int | None) -> ScaledRowsScheme:
        """Return the scheme of the part.

        Args:
            rotated: rows of a Hadamard matrix; None: rows are not rotated.
        """

    @abstractmethod
    def code_of(self, storage: torch.dtype, device: torch.device) -> GaussianCode:
        """Return the code that the weights are rounded to.

        Args:
            storage: the dtype of stored floats.
        """

    @abstractmethod
    def improve(self, sweep: BlockSweep) -> None:
        """Improve scales and codes after the sweep."""

    def _rotated(self, rows: int) -> int | None:
        return largest_block(rows) if self.rotate == "both" else None

    def effects(self, layer: LayerScheme) -> Effects:
        rows, width = layer.shape
        part = self.scheme(self._rotated(rows))
        problem, sides = part.refuses(layer.shape), {"inputs": width}
        for side, size in (sides | ({"outputs": rows} if self.rotate == "both" else {})).items():
            if problem is None and not exists(size) and largest_block(size) < SMALLEST_BLOCK:
                problem = f"no Hadamard matrix of order {SMALLEST_BLOCK} or more divides its {size} {side}; ignore it"
        scheme = layer.with_parts(part).with_transform(HadamardScheme(largest_block(width)))
        return replace(super().effects(layer), scheme=scheme, problem=problem)

    def memory(self, size: ProblemSize) -> int:
        return 2 * super().memory(size) + 2 * factor_bytes(size.shape[1])

    def solve(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Solution:
        if statistics.tokens == 0:
            raise NumericError(f"{layer.name}: no calibration token reached this layer")
        rows, width = weight.shape
        turn = Hadamard.of(largest_block(width), self.seed, (rows, width)).to(weight.device)
        scheme, code = self.scheme(self._rotated(rows)), self.code_of(layer.storage, weight.device)
        turned, signs = turn(self.fitted(weight.float(), statistics)), None
        if scheme.rotated is not None:
            signs = signs_of(rows, self.seed + 1).to(weight.device)
            turned = rotated_rows(turned, signs, scheme.rotated)
        hessian = turn(turn(statistics.shrunk(self.regularization)).T.contiguous())
        factor, used = inverse_factor(hessian, self.damping)
        if used != self.damping:
            layer.log("fallback", "damping raised until the Hessian was positive definite", damping=used)
        scale = turned.square().mean(1).sqrt() * code.scale
        sweep = BlockSweep(turned, damped(hessian, used), code.blocks, scale, layer.storage)
        sweep.sweep(factor)
        self.improve(sweep)
        stored = {"codes": sweep.codes.flatten(1), "scale": sweep.scale.to(layer.storage), "signs": signs}
        part = COMPONENTS[scheme.kind](scheme, (rows, width), stored | code.tensors)
        assert isinstance(part, WeightPart)
        return Solution([part], transforms=(turn,))
