"""SmoothQuant: move outliers of activations into the weights, which are easier to round (Xiao 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.api.facts import Fact, Log
from compress.api.layers import BlockInputs
from compress.api.memory import ProblemSize
from compress.api.observers import InputAbsMax, Rows
from compress.api.passes import BlockPass
from compress.model.linear import CompressedLinear, linears, replace_linear
from compress.model.structure.links import Group, fold
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.weights.layer import LayerScheme
from compress.weights.transforms.rounding import InputRounding
from compress.weights.transforms.scale import ScaleScheme

SEARCHED = tuple(i / 20 for i in range(21))  # candidates of alpha: search; each one costs one rounding of the readers
Equalize = Callable[[Tensor], Tensor]
"""Make a scale equal on columns that belong to one channel."""
SMALLEST = 1e-5  # reference code (smooth.py): scales and weight maxima are kept above this


class SmoothQuant(BlockPass):
    """Move outliers from activations into weights, so that activations can be quantized; follow with a quantizing pass.

    Divide each input channel by s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), and multiply the weights by it.
    The division is folded into the module that writes the input: a norm, or a linked linear. Each fold is proved in
    float32, and undone if it changes the block's output. Linears without a link are not smoothed, or, with
    unlinked: scale, divide their inputs at run time (format native stores such a scale).

    alpha: search tries all values of SEARCHED, and no smoothing, for each link. It takes the value with the least error
    of the readers' outputs with weights in int8 per row and inputs in int8 per token, on a few hundred tokens.
    """

    use_for: ClassVar[str] = "Inputs in 8 bits (W8A8), in front of gptq or rtn."
    not_for: ClassVar[str] = "Weights alone: it makes them harder to round."
    paper: ClassVar[str] = "https://arxiv.org/abs/2211.10438"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "cache_quantized"})
    prepares: ClassVar[Fact | None] = "quantized"

    alpha: Annotated[float, Field(ge=0, le=1)] | Literal["search"] = Field(
        default=0.5,
        description="migration strength: larger values move more of the range to the weights; 'search': best per link",
    )

    unlinked: Literal["leave", "scale"] = Field(
        default="leave",
        description="linears whose scale no earlier module can absorb: 'leave': skip them; 'scale': divide their "
        "inputs at run time",
    )

    def memory(self, size: ProblemSize) -> int:
        return super().memory(size) + sum(map(Rows.memory_bytes, size.inputs))

    def at_most(self, before: LayerScheme) -> LayerScheme:
        return before.with_transform(ScaleScheme()) if self.unlinked == "scale" else before

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        seen = inputs.observe(InputAbsMax if self.alpha != "search" else Rows)
        linked = {name for link in inputs.links for name in link.readers}
        for group in inputs.groups:
            if not linked & set(group.linears):
                self._unlinked(block, group, seen[group], log)
        for link in inputs.links:
            groups = [group for group in inputs.groups if set(group.linears) & set(link.readers)]
            scale = self._scale(block, link.readers, {group: seen[group] for group in groups}, link.equalize, log)
            if scale is None:
                continue
            done = fold(block, link, scale, inputs.probe)
            if done.kept:
                for group in groups:  # another link may have the same readers
                    seen[group].divide(scale)
            else:
                where = ", ".join(link.readers)
                message = f"{where}: folding the scale into {link.source} changed the block's output, so it was undone"
                log("fallback", message, relative_error=done.error)

    def _unlinked(self, block: nn.Module, group: Group, seen: InputAbsMax, log: Log) -> None:
        """Handle a group without a link."""
        if self.unlinked == "leave":
            where = ", ".join(group.linears)
            log("note", f"{where}: no module before them can absorb a scale, so they are not smoothed")
            return
        scale = self._scale(block, group.linears, {group: seen}, lambda scale: scale, log)
        if scale is not None:
            for name in group.linears:
                replace_linear(block, name).rescale_input(scale)

    def _scale(
        self, block: nn.Module, readers: Sequence[str], seen: Mapping[Group, Any], equalize: Equalize, log: Log
    ) -> Float[Tensor, " in"] | None:
        """The scale of the readers' input; None, and a journal entry, if no token reached them."""
        if not any(found.tokens for found in seen.values()):
            log("fallback", f"{', '.join(readers)}: no calibration token reached them, so they are not smoothed")
            return None
        absmax = torch.stack([found.absmax for found in seen.values()]).amax(0)
        ranges = equalize(absmax), equalize(weight_absmax(block, readers))
        if isinstance(self.alpha, float):
            return equalize(smoothing(*ranges, self.alpha))
        return self.search(block, readers, ranges, seen, equalize, log)

    def search(
        self,
        block: nn.Module,
        readers: Sequence[str],
        ranges: tuple[Float[Tensor, " in"], Float[Tensor, " in"]],
        seen: Mapping[Group, Rows],
        equalize: Equalize,
        log: Log,
    ) -> Float[Tensor, " in"]:
        """The scale with the least error of the rounded readers; ones if no smoothing is best."""
        trials: dict[float | None, Tensor] = {None: torch.ones_like(ranges[0])}
        trials |= {alpha: equalize(smoothing(*ranges, alpha)) for alpha in SEARCHED}
        errors = dict.fromkeys(trials, 0.0)
        for group, found in seen.items():
            rows = found.rows
            if rows is None:
                continue
            for name in group.linears:
                weight = CompressedLinear.of(block.get_submodule(name)).weight.float()
                wanted = rows @ weight.T
                for alpha, scale in trials.items():
                    errors[alpha] += rounded_error(rows, weight, scale, wanted)
        best = min(errors, key=lambda alpha: errors[alpha])
        figures = {"alpha": best, "error": errors[best] ** 0.5, "unsmoothed": errors[None] ** 0.5}
        log("note", f"{', '.join(readers)}: the best of {len(trials)} scales", **figures)
        return trials[best]


def smoothing(inputs: Float[Tensor, " in"], weights: Float[Tensor, " in"], alpha: float) -> Float[Tensor, " in"]:
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)  (equation 4); 1 for channels that were always zero."""
    scale = inputs.pow(alpha) / weights.clamp(min=SMALLEST).pow(1 - alpha)
    return torch.where(inputs > 0, scale.clamp(min=SMALLEST), torch.ones_like(scale))


def rounded_error(
    rows: Float[Tensor, "rows in"],
    weight: Float[Tensor, "out in"],
    scale: Float[Tensor, " in"],
    wanted: Float[Tensor, "rows out"],
) -> float:
    """||Q(X / s) Q(W s)^T - X W^T||^2 / ||X W^T||^2 with int8 per token and per row (W8A8)."""
    grid = GRIDS["int8"]
    found = InputRounding.of(grid)(rows / scale) @ quantize(weight * scale, grid, "channel").dense().T
    return float((found - wanted).square().sum() / wanted.square().sum().clamp(min=1e-30))


def weight_absmax(block: nn.Module, readers: Sequence[str]) -> Float[Tensor, " in"]:
    """The largest magnitude in each input column over all readers that are linears, in float32."""
    named = linears(block)
    weights = [CompressedLinear.of(named[name]).weight for name in readers if name in named]
    return torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
