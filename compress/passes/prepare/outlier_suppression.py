"""Outlier Suppression+: center input channels, and scale down those with outliers (Wei 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import InputRounding
from compress.models.structure.shifts import fold_shift, without_bias
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.facts import Effects, Preparation, Requirements
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import InputAbsMax, InputRange
from compress.passes.contract.passes import COPIES
from compress.passes.families.equalizing import EqualizingPass, Readers
from compress.passes.families.weight_grid import GridName, GroupSizeOption, WeightGrid

SPAN = 127.0  # smallest threshold, relative to the range: smaller inputs are rounded to zero on int8 without scales


class OutlierSuppression(WeightGrid, EqualizingPass):
    """Center and scale down input channels with outliers; rtn or gptq with the same grids follows.

    Shift: z_j = (max X_j + min X_j) / 2 is subtracted from each channel in the bias of the module that writes it, and W
    z is added to the biases of the linears that read it. It is left out where one of them has no bias, as in models
    with RMSNorm.

    Scale: s_j = max(1, max|X_j - z_j| / t) divides the channels above the threshold t and multiplies the weights. t is
    searched between the range of the input and 1/127 of it, in `steps` equal ratios; no scale is tried as well. The
    choice has the least error of the block's output on the first calibration batch, with weights and inputs rounded.
    The reference code has equal differences and at least 100 steps, and compares the outputs of attention and MLP,
    which it finds by their names.

    Both are folded into the module that writes the input: a norm, or a linked linear. Each fold is verified in float32,
    and undone if it changes the block's output.
    """

    use_for: ClassVar[str] = (
        "Activations in 8 bits of models with LayerNorm and biases, whose channels can be centered, before gptq or rtn."
    )
    not_for: ClassVar[str] = (
        "Weights in 4 bits, where recipe w4a8 loses less. 8 bits on models with RMSNorm, where w8a8-rotated loses "
        "less. Short runs: every input takes `steps` passes through its block."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2304.09145"

    weights: GridName = Field(default="int8", description=f"number grid of the weights: {', '.join(GRIDS)}")
    group_size: GroupSizeOption = Field(
        default="channel", description="columns that share a scale; 'channel': a whole row, 'tensor': the whole matrix"
    )
    shift: bool = Field(default=True, description="center each channel, where biases can absorb this")
    steps: int = Field(default=20, ge=1, description="thresholds to try per input; each takes a pass through the block")
    activations: Literal["int8", "fp8_e4m3", "int4"] = Field(
        default="int8", description="grid of the activations of the pass that follows"
    )
    activation_scale: Literal["token", "static"] = Field(
        default="token", description="scales of the activations of the pass that follows"
    )

    @property
    def requires(self) -> Requirements:
        return Requirements(data=True, batches=True)

    def memory(self, size: ProblemSize) -> int:
        """As for any equalization, and the rounded readers during a pass through the block."""
        return super().memory(size) + max(size.forward_bytes, COPIES * 4 * size.largest)

    @property
    def statistics(self) -> type[InputAbsMax]:
        return InputRange

    def effects(self, layer: LayerScheme) -> Effects:
        return replace(
            super().effects(layer), prepares=Preparation("quantized", self._mismatch, "shifts and rescales channels")
        )

    def _mismatch(self, later: Effects) -> str | None:
        rounding, options = later.scheme.rounding, (self.activations, self.activation_scale)
        if rounding is None or (rounding.grid.name, rounding.scale) != options:
            spelled = "activations: {}, activation_scale: {}".format(*options)
            return f"it needs {spelled}; write the same options in both passes"
        return self.grid_mismatch(later)

    def scale(self, readers: Readers) -> Float[Tensor, " in"] | None:
        if self.shift and readers.link is not None:
            self.center(readers)
        inputs = readers.equalize(readers.absmax)
        target = readers.inputs.forward(readers.block, 0).float()
        trials = {threshold: suppressing(inputs, threshold) for threshold in self.thresholds(inputs)}
        errors = {threshold: self.error(readers, scale, target) for threshold, scale in trials.items()}
        best, largest = min(errors, key=lambda threshold: errors[threshold]), max(errors)
        figures = {"threshold": best, "range": largest, "error": errors[best], "unscaled": errors[largest]}
        readers.log("note", f"{readers.where}: the best of {len(trials)} thresholds", **figures)
        return None if best == largest else trials[best]

    def center(self, readers: Readers) -> None:
        """Shift the readers' inputs to the middle of the range of each channel, if biases can absorb it."""
        assert readers.link is not None
        if missing := without_bias(readers.block, readers.link):
            readers.log("note", f"{readers.where}: not shifted, because {', '.join(missing)} has no bias")
            return
        ranges: list[InputRange] = list(readers.statistics.values())
        high = readers.equalize(torch.stack([channel_range.high for channel_range in ranges]).amax(0))
        low = -readers.equalize(-torch.stack([channel_range.low for channel_range in ranges]).amin(0))
        # z_j = (max X_j + min X_j) / 2
        shift = (high + low) / 2
        rewrite = fold_shift(readers.block, readers.link, shift, readers.inputs.probe)
        if not rewrite.is_kept:
            message = f"not shifted, because a shift of {readers.link.source} does not reach them unchanged"
            readers.log("note", f"{readers.where}: {message}", relative_error=rewrite.error)
            return
        for channel_range in ranges:
            channel_range.subtract(shift)
        readers.log("note", f"{readers.where}: shifted", largest=float(shift.abs().max()))

    def thresholds(self, inputs: Float[Tensor, " in"]) -> list[float]:
        """Return the thresholds to try, from the range of the input, which is no scale, down.

        Args:
            inputs: max|X_j|.
        """
        live = inputs[inputs > 0]
        if not len(live):
            return [1.0]
        top = float(live.max())
        ratio = max(1 / SPAN, float(live.min()) / top)
        return list(dict.fromkeys(top * ratio ** (step / self.steps) for step in range(self.steps + 1)))

    def error(self, readers: Readers, scale: Float[Tensor, " in"], target: Float[Tensor, "*out"]) -> float:
        """||block'(X) - block(X)|| / ||block(X)|| on the first batch; block': with its readers scaled and rounded."""
        with self.rounded(readers, scale):
            output = readers.inputs.forward(readers.block, 0).float()
        error, energy = float((output - target).square().sum()), float(target.square().sum())
        error, energy = readers.inputs.processes.totals(error, energy)
        return (error / max(energy, 1e-30)) ** 0.5

    @contextmanager
    def rounded(self, readers: Readers, scale: Float[Tensor, " in"]) -> Iterator[None]:
        """Return the block with rounded weights W s and inputs X / s of the readers; as before at the end."""
        grid, modules = GRIDS[self.activations], {name: readers.block.get_submodule(name) for name in readers.linears}
        top = (readers.absmax / scale).max()
        storage = readers.inputs.storage
        rounding = (
            InputRounding.of(grid) if self.activation_scale == "token" else InputRounding.covering(grid, top, storage)
        )
        try:
            for name, layer in readers.linears.items():
                trial = CompressedLinear(layer.weight, layer.bias, layer.transposed)
                trial.transforms = nn.ModuleList(layer.all_transforms)
                trial.rescale_input(scale)
                codes = quantize(trial.weight.float(), self.grid, self.group_size, self.symmetric)
                trial.put(codes.dense().to(layer.weight.dtype))
                trial.round_inputs(rounding)
                _replace(readers.block, name, trial)
            yield
        finally:
            for name, module in modules.items():
                _replace(readers.block, name, module)


def suppressing(inputs: Float[Tensor, " in"], threshold: float) -> Float[Tensor, " in"]:
    """s_j = max(1, max|X_j - z_j| / t) (section 4.2).

    Args:
        inputs: max|X_j - z_j|.
    """
    return (inputs / threshold).clamp(min=1.0)


def _replace(block: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another one of the block."""
    parent, _, leaf = name.rpartition(".")
    setattr(block.get_submodule(parent), leaf, module)
