"""SmoothQuant: move the outliers of activations into the weights, where they are easier to round (Xiao 2022)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.contract import BlockInputs, BlockPass
from compress.model.links import Group, fold_into_norm
from compress.model.packed import CompressedLinear
from compress.stream.observers import InputAbsMax
from compress.types import Fact, Note

SMALLEST = 1e-5  # reference code (smooth.py): scales and weight maxima are kept above this


class SmoothQuant(BlockPass):
    """Divide each input channel by s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), and multiply the weights by it.

    The division is folded into the norm that writes the input; groups of linears that no norm feeds are left alone.
    Each fold is proved in float32, and undone when it changes the block's output.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2211.10438"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    alpha: float = Field(default=0.5, ge=0, le=1, description="how much of the difficulty moves to the weights")

    def solve_block(self, block: nn.Module, inputs: BlockInputs, note: Note) -> None:
        seen = inputs.observe(InputAbsMax)
        for group in inputs.groups:
            where = ", ".join(group.linears)
            if group.norm is None:
                note("note", f"{where}: no norm writes their input, so nothing is smoothed")
                continue
            absmax = seen[group].absmax
            if seen[group].tokens == 0:
                note("fallback", f"{where}: no calibration token reached them, so nothing is smoothed")
                continue
            fold = fold_into_norm(block, group, self.scale(absmax, weight_absmax(block, group)), inputs.probe)
            if not fold.kept:
                message = f"{where}: folding into {group.norm} would change the block's output, so it was undone"
                note("fallback", message, relative_error=fold.error)

    def scale(self, inputs: Float[Tensor, " in"], weights: Float[Tensor, " in"]) -> Float[Tensor, " in"]:
        """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)  (equation 4); 1 for channels that were always zero."""
        scale = inputs.pow(self.alpha) / weights.clamp(min=SMALLEST).pow(1 - self.alpha)
        return torch.where(inputs > 0, scale.clamp(min=SMALLEST), torch.ones_like(scale))


def weight_absmax(block: nn.Module, group: Group) -> Float[Tensor, " in"]:
    """The largest magnitude in each input column over all linears of a group, in float32."""
    weights = [CompressedLinear.of(block.get_submodule(name)).weight for name in group.linears]
    return torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
