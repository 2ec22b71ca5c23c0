"""SmoothQuant: move the outliers of activations into the weights, where they are easier to round (Xiao 2022)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.contract import BlockInputs, BlockPass
from compress.model.links import Link, fold
from compress.model.packed import CompressedLinear, linears
from compress.stream.observers import InputAbsMax
from compress.types import Fact, Note

SMALLEST = 1e-5  # reference code (smooth.py): scales and weight maxima are kept above this


class SmoothQuant(BlockPass):
    """Divide each input channel by s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), and multiply the weights by it.

    The division is folded into what writes the input: a norm, or a linear that is linked to it. Linears that nothing
    is linked to are left alone. Each fold is proved in float32, and undone when it changes the block's output.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2211.10438"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    alpha: float = Field(default=0.5, ge=0, le=1, description="how much of the difficulty moves to the weights")

    def solve_block(self, block: nn.Module, inputs: BlockInputs, note: Note) -> None:
        seen = inputs.observe(InputAbsMax)
        linked = {name for link in inputs.links for name in link.readers}
        for group in inputs.groups:
            if not linked & set(group.linears):
                where = ", ".join(group.linears)
                note("note", f"{where}: nothing that writes their input can take a scale, so nothing is smoothed")
        for link in inputs.links:
            where = ", ".join(link.readers)
            observed = [seen[group] for group in inputs.groups if set(group.linears) & set(link.readers)]
            if not any(found.tokens for found in observed):
                note("fallback", f"{where}: no calibration token reached them, so nothing is smoothed")
                continue
            absmax = torch.stack([found.absmax for found in observed]).amax(0)
            scale = link.share(self.scale(link.share(absmax), link.share(weight_absmax(block, link))))
            done = fold(block, link, scale, inputs.probe)
            if not done.kept:
                message = f"{where}: folding into {link.source} would change the block's output, so it was undone"
                note("fallback", message, relative_error=done.error)

    def scale(self, inputs: Float[Tensor, " in"], weights: Float[Tensor, " in"]) -> Float[Tensor, " in"]:
        """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)  (equation 4); 1 for channels that were always zero."""
        scale = inputs.pow(self.alpha) / weights.clamp(min=SMALLEST).pow(1 - self.alpha)
        return torch.where(inputs > 0, scale.clamp(min=SMALLEST), torch.ones_like(scale))


def weight_absmax(block: nn.Module, link: Link) -> Float[Tensor, " in"]:
    """The largest magnitude in each input column over all linears that read a link, in float32."""
    named = linears(block)
    weights = [CompressedLinear.of(named[name]).weight for name in link.readers if name in named]
    return torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
