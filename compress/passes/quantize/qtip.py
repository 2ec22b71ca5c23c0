"""QTIP: weights rotated by Hadamard matrices, and tiles of them as paths through a trellis (Tseng 2024)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from compress.layers.parts.trellis import TrellisScheme
from compress.numerics.block_sweep import BlockSweep
from compress.numerics.quant.gaussian_codes import Code, best_scale, first_table, values_of
from compress.numerics.quant.trellis import Viterbi, decode, pack, search_bytes
from compress.passes.contract.memory import ProblemSize
from compress.passes.families.rotated import GaussianCode, RotatedPass


class QTIP(RotatedPass):
    """Rotate weights and inputs by randomized Hadamard matrices, and store tiles of weights as paths through a trellis.

    Trellis: the rotated weight is nearly Gaussian. A tile of 256 weights is a sequence, and each weight is the value of
    a state of `states` bits. Every step shifts `bits` new bits into the state, so a tile is one string of 512 bits at 2
    bits (section 3.1), a circle whose end leads to its start (section 3.2).

    Rounding: Viterbi's algorithm finds the best string for the target that LDLQ gives (algorithm 5). Tiles are rounded
    from left to right, and later ones compensate each error. Scales are per row, and fitted by least squares after the
    sweep; the paper has one per layer.

    Error: at 2 bits the squared error for Gaussian weights is 0.073 (2^12 states). That of E8P is 0.089, and the limit
    (rate distortion) is 0.0625. The time to compress grows as 2^states, that to run the model does not; the paper has
    16.

    `code` gives the values of the states:

    - 3inst and 1mad compute them from the bits of the state.
    - hyb looks pairs of values up in a table of 16 kbit per layer. Its steps of 3, 5 or 7 bits for two weights are 1.5,
      2.5 or 3.5 bits a weight (error at 1.5 bits: 0.144, limit 0.125).

    rotate: 'both' also rotates the outputs, as the paper does. With 'inputs' distill and lkd can learn the scales of
    the rows.
    """

    use_for: ClassVar[str] = (
        "1 to 4 bits (and 0.03 for scales), with less error than integers, a lattice or codebooks. Follow it by "
        "distill."
    )
    not_for: ClassVar[str] = "Speed: inputs are rotated when a layer runs, and the values of states are computed."
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.11235"

    bits: float = Field(
        default=2,
        ge=1,
        le=4,
        multiple_of=0.5,
        description="bits per weight: 1, 2, 3 or 4; with code: hyb also 1.5, 2.5 or 3.5",
    )
    states: int = Field(
        default=12,
        ge=2,
        le=16,
        description="bits of a state; each bit more doubles the time, and lowers the squared error by 3% or less",
    )
    code: Code = Field(default="3inst", description="how the bits of a state become a value, or two values with 'hyb'")
    tile_rows: int = Field(default=16, ge=1, le=256, description="outputs that a tile spans")
    tile_columns: int = Field(
        default=16,
        ge=1,
        le=256,
        description="inputs that a tile spans; they do not compensate each other's errors: fewer are slower and better",
    )
    refine: int = Field(
        default=0, ge=0, le=100, description="rounds after the sweep in which tiles and scales are chosen again"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.scheme(None).check()

    def scheme(self, rotated: int | None) -> TrellisScheme:
        bits = self.bits if self.bits % 1 else int(self.bits)
        return TrellisScheme(bits, self.states, self.code, self.tile_rows, self.tile_columns, rotated)

    def code_of(self, storage: torch.dtype, device: torch.device) -> GaussianCode:
        tables = {"table": first_table().to(device, storage, copy=True)} if self.code == "hyb" else {}
        values = values_of(self.code, self.states, tables.get("table"), device)
        return GaussianCode(_Tiles(self.scheme(None), values), best_scale(self.bits, values), tables)

    def improve(self, sweep: BlockSweep) -> None:
        sweep.fit_scales()
        for _ in range(self.refine):
            sweep.descend()
            sweep.fit_scales()

    def memory(self, size: ProblemSize) -> int:
        trellis, sequences = self.scheme(None).trellis, size.shape[0] // self.tile_rows
        steps = self.tile_rows * self.tile_columns // trellis.length
        return super().memory(size) + search_bytes(trellis, steps, sequences)


class _Tiles:
    """Tiles of weights as tail-biting walks;

    Attributes:
        values: of the states.
    """

    def __init__(self, scheme: TrellisScheme, values: Float[Tensor, "states length"]) -> None:
        self.rows, self.columns, self.size = scheme.tile_rows, scheme.tile_columns, scheme.tile_bytes
        self._trellis, self._values = scheme.trellis, values
        self._search = Viterbi(values, self._trellis)

    def encode(self, values: Float[Tensor, "out columns"]) -> Int[Tensor, "tiles bytes"]:
        return pack(self._search.tail_biting(values.reshape(-1, self.rows * self.columns)), self._trellis)

    def decode(self, codes: Int[Tensor, "tiles bytes"]) -> Float[Tensor, "out columns"]:
        return decode(codes, self._values, self._trellis).view(-1, self.columns)
