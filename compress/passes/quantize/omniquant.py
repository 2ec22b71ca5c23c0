"""OmniQuant: learn the clipping of weights and scales of channels, block by block, by gradient descent (Shao 2023)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear
from compress.layers.transforms.rounding import InputRounding
from compress.models.structure.links import Link, fold
from compress.models.structure.rewrite import remember
from compress.models.structure.shifts import fold_shift, without_bias
from compress.numerics.linalg import Regularization
from compress.numerics.quant.clipping import LearnedClipping, clipping_bytes
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.fake import straight
from compress.numerics.quant.grids import Grid
from compress.numerics.quant.rounding import round_columns, rounding_bytes
from compress.passes.contract.facts import Log
from compress.passes.contract.layers import BlockInputs, Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, InputRange, UnitGram
from compress.passes.contract.options import OF_THE_WHOLE
from compress.passes.families.descent import Descent, Forward, rounded, shuffled, with_forwards
from compress.passes.families.equalizing import smoothing, weight_absmax
from compress.passes.families.learned_rounding import BlockQuantizing
from compress.passes.families.quantizing import ScaleOption
from compress.train.options import Share, split_held_out

EPOCHS = 20  # OmniQuant, section 4.1, which has 40 for 2 bits
ALPHA = 0.5  # OmniQuant, reference code (main.py): migration strength of the initial scales, which are SmoothQuant's


class OmniQuant(BlockQuantizing):
    """Learn clipped ranges of weights, and scales and shifts of channels, block by block, then round.

    Minimize ||block(X) - target||^2 with every linear rounded as Q((X - z) / s) Q(s W) + (b + z W) (equation 3).

    - gamma and beta, for each group: the range of the weights is clipped to sigma(gamma) max W and sigma(beta) min W
      (equation 2).
    - s and z (`transform`), for each channel that a norm or a linked linear writes. s starts from SmoothQuant, z from
      the middle of the channel's range. log s is what is learned, so that one rate suits all channels.

    Gradients pass straight through rounding. Without activation quantization, the paper learns no transform of models
    with RMSNorm, so this is the default.

    In the end s and z are folded into the module that writes the channels. Each fold is verified in float32, and undone
    if it changes the block's output. The state with the least error on the held-out batches (on all batches if none are
    held out) is kept, if its error is less than without learning.

    Differences from the paper:

    - z is left out where a module has no bias, as in models with RMSNorm.
    - The scale between queries and keys is left out. It multiplies rows of weights, whose scales absorb it, so it has
      no effect unless queries and keys are quantized.
    - The FFN's second linear has an s too, where a linear writes its input (gated FFNs).
    - The ranges start from those of the least error (scale: absmax as the paper), because a few hundred steps of the
      paper's rate are too few to get there.
    """

    use_for: ClassVar[str] = "2 to 4 bits by rounding to nearest, with learned ranges and learned scales of channels."
    not_for: ClassVar[str] = (
        "The least loss: gptq, signround and block_ap lose less at the same bits, and rotate much less with "
        "activations in 4 bits."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2308.13137"
    repeats: ClassVar[str | None] = "epochs"

    of_the_whole: ClassVar[frozenset[str]] = OF_THE_WHOLE | frozenset(
        {"transform", "finish", "epochs", "learning_rate", "transform_rate", "hold_out", "seed", "error"}
    )

    scale: ScaleOption = Field(
        default="mse",
        description="the range at the start: 'mse': that of the least error of the weights, which needs fewer steps; "
        "'absmax' clips it to 0.98, as in the paper; others as for rtn",
    )
    transform: bool | None = Field(
        default=None,
        description="learn scales and shifts of input channels; null: if inputs are rounded",
    )
    finish: Literal["nearest", "gptq"] = Field(
        default="nearest",
        description="rounding of weights to the learned scales: to nearest, as in the paper, or by the sweep of gptq",
    )
    epochs: int = Field(
        default=EPOCHS,
        ge=1,
        description=f"passes over the calibration batches that are trained on; grids of at most 2 bits: {2 * EPOCHS}",
    )
    learning_rate: float = Field(default=5e-3, gt=0, description="of the logits of the clipped ranges")
    transform_rate: float = Field(
        default=1e-3,
        gt=0,
        description="of the logarithms of scales, and of shifts relative to the range of a channel; "
        "the paper has 0.01, for the scales themselves",
    )
    hold_out: Share = Field(
        default=0.1, description="fraction of the batches to hold out of the training; the best state on them is kept"
    )
    seed: int = Field(default=0, ge=0, description="seed of the order of the batches and of the held-out ones")

    @classmethod
    def of_grid(cls, grid: Grid, options: Mapping[str, Any]) -> dict[str, Any]:
        """Also the number of epochs."""
        return super().of_grid(grid, options) | ({"epochs": 2 * EPOCHS} if grid.bits <= 2 else {})

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if not self.grid.free_scales:
            reason = f"weights {self.weights}: its scales are no plain floats to be learned"
            raise ValueError(f"{reason}; use the pass signround")
        if self.group_size == "tensor":
            raise ValueError(
                "group_size: tensor has one range for all rows, which scales of channels move; use channel"
            )

    def without_effect(self) -> dict[str, str]:
        idle = {"transform_rate": "without transform; write transform: true"}
        return super().without_effect() | ({} if self.transforms else idle)

    @property
    def transforms(self) -> bool:
        """Whether scales and shifts of channels are learned."""
        rounded = any(step.input_grid is not None for step in self.variants())
        return rounded if self.transform is None else self.transform

    def memory(self, size: ProblemSize) -> int:
        """The maximum over observation, rounding and learning, plus the weights in float32 and the target outputs."""
        width = max(size.inputs, default=1)
        statistics = UnitGram.block_bytes(size) if self.finish == "gptq" else 0
        group = self.group_size if isinstance(self.group_size, int) else width
        learn = clipping_bytes(size.weights, size.weights // group) + 2 * 4 * size.length * size.passed
        targets = size.states_bytes if self.error == "symmetric" else 0
        links = InputRange.block_bytes(size) + size.beginning_bytes
        sweep = statistics + rounding_bytes(size.largest // width, width)
        return targets + 4 * size.weights + max(statistics + size.forward_bytes, sweep, learn, links)

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        batch_numbers, roundings = range(inputs.batches), self.roundings(inputs)
        targets = [self.target(block, inputs, batch) for batch in batch_numbers]
        trained, held_out_batches = split_held_out(inputs.batches, self.hold_out, self.seed)
        descent = Descent(block, inputs, targets, held_out_batches or trained)
        plain = self._codes(block, inputs, self._clippings(block, inputs, {}), log)
        error_before = self._error(descent, plain, roundings)
        changes = self._changes(block, inputs, log) if self.transforms else []
        of = {name: change for change in changes for name in change.link.readers}
        clippings = self._clippings(block, inputs, of)
        with _learning(block, clippings, of, roundings):
            self._learn(descent, trained, clippings, changes)
        undo = remember(*block.modules())
        for change in changes:
            change.fold(block, inputs, log)
        codes = self._codes(block, inputs, clippings, log)
        error_after = self._error(descent, codes, roundings)
        log("note", "error of the block's output", start=error_before, learned=error_after)
        if not error_after < error_before:
            message = "learning did not reduce the error; the weights are rounded without it"
            log("fallback", message, start=error_before, learned=error_after)
            undo()
            codes = plain
        for name, layer_codes in codes.items():
            rounding = roundings[name]
            inputs.put(name, Solution(layer_codes, transforms=() if rounding is None else (rounding,)))

    def _clippings(
        self, block: nn.Module, inputs: BlockInputs, changes: Mapping[str, Transformation]
    ) -> dict[str, LearnedClipping]:
        """Return the ranges at the start, of every layer.

        Args:
            changes: those of its inputs, by the name of the layer.
        """
        clippings = {}
        for name in inputs.names:
            layer, weight = inputs.layer(name), _weight(block, name)
            scaled = weight * changes[name].scale.detach() if name in changes else weight
            clippings[name] = LearnedClipping(scaled, self.options_of(inputs, name).grid_options(layer), layer.mask)
        return clippings

    def _changes(self, block: nn.Module, inputs: BlockInputs, log: Log) -> list[Transformation]:
        """Return the transformations to learn: one for the input of every layer that a link leads to."""
        statistics, changes, changed_readers = inputs.observe(InputRange), [], set[str]()
        for link in inputs.links:
            groups = [group for group in inputs.groups if set(group.linears) & set(link.readers)]
            reader_names, source = ", ".join(link.readers), block.get_submodule(link.source)
            if isinstance(source, CompressedLinear) and source.quantized:
                log("note", f"{reader_names}: not transformed, because {link.source} is quantized already")
            elif changed_readers & set(link.readers):
                log("note", f"{reader_names}: not transformed again by {link.source}")
            elif not any(statistics[group].tokens for group in groups):
                log("fallback", f"{reader_names}: no calibration token reached them, so they are not transformed")
            else:
                low = torch.stack([statistics[group].low for group in groups]).amin(0)
                high = torch.stack([statistics[group].high for group in groups]).amax(0)
                changes.append(Transformation.start(block, link, low, high, inputs, log))
                changed_readers |= set(link.readers)
        if missing := [name for name in inputs.names if name not in changed_readers]:
            log("note", f"{', '.join(missing)}: no module before them can absorb a scale, so they are not transformed")
        return changes

    def _learn(
        self,
        descent: Descent,
        trained: Sequence[int],
        clippings: Mapping[str, LearnedClipping],
        changes: Sequence[Transformation],
    ) -> None:
        logits = [tensor for clipping in clippings.values() for tensor in clipping.parameters]
        moved = [tensor for change in changes for tensor in change.parameters]
        groups = [{"params": logits, "lr": self.learning_rate}, {"params": moved, "lr": self.transform_rate}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)  # section 4.1: zero weight decay
        steps = self.epochs * len(trained)
        checked = range(0, steps + 1, len(trained))
        descent.run(optimizer, islice(shuffled(trained, self.seed), steps), checked)

    def _codes(
        self, block: nn.Module, inputs: BlockInputs, clippings: Mapping[str, LearnedClipping], log: Log
    ) -> dict[str, Codes]:
        """Return the rounded weights, with the scales of the clipped ranges."""
        nearest = {name: clipping.codes(_weight(block, name)) for name, clipping in clippings.items()}
        if self.finish == "nearest":
            return nearest
        codes = dict(nearest)
        for group, statistics in inputs.observe(UnitGram).items():
            for name in [name for name in group.linears if name in nearest]:
                if statistics.tokens:
                    layer = inputs.layer(name)
                    codes[name] = self.swept(_weight(block, name), nearest[name], statistics, layer)
                else:
                    log("fallback", f"{name}: no calibration token reached this layer; it is rounded to nearest")
        return codes

    def swept(self, weight: Float[Tensor, "out in"], nearest: Codes, statistics: Gram, layer: Layer) -> Codes:
        """Return the weight rounded by GPTQ with the scales and zero points of its nearest codes."""
        options = self.for_layer(layer.name) or self
        order = statistics.diagonal.argsort(descending=True, stable=True)
        factor = statistics.factor_of(layer.name, layer.log, Regularization(), order)
        fixed_options = replace(options.grid_options(layer), fixed_scales=(nearest.scale, nearest.zero))
        return round_columns(weight, factor, fixed_options, layer.mask, order).codes

    def _error(
        self, descent: Descent, codes: Mapping[str, Codes], roundings: Mapping[str, InputRounding | None]
    ) -> float:
        """Return the relative squared error of the block with these codes."""
        forwards = {name: partial(rounded, layer_codes.dense(), roundings[name]) for name, layer_codes in codes.items()}
        with with_forwards(descent.block, forwards):
            return descent.error


class Transformation:
    """A learned scale and shift of the channels that a link's source writes: x becomes (x - shift) / scale.

    link: the path that the change can move along. scale: [in], at the start. shift: [in] at the start, or None: none.
    extent: [in], the size of a shift of 1. All are equal on columns of one channel.
    """

    def __init__(
        self,
        link: Link,
        scale: Float[Tensor, " in"],
        shift: Float[Tensor, " in"] | None,
        extent: Float[Tensor, " in"],
    ) -> None:
        self.link, self._scale, self._shift, self._extent = link, scale, shift, extent
        self._channels = link.channels.to(scale.device)
        count = int(self._channels.max()) + 1
        self.growth = torch.zeros(count, device=scale.device, requires_grad=True)
        self.offset = torch.zeros(count, device=scale.device, requires_grad=True)

    @classmethod
    def start(
        cls,
        block: nn.Module,
        link: Link,
        low: Float[Tensor, " in"],
        high: Float[Tensor, " in"],
        inputs: BlockInputs,
        log: Log,
    ) -> Transformation:
        """The scale of SmoothQuant, and the middle of the range of each channel as the shift, if biases can absorb it.

        low, high: the range of every input channel.
        """
        reader_names, shift = ", ".join(link.readers), None
        high, low = link.equalize(high), -link.equalize(-low)
        if missing := without_bias(block, link):
            log("note", f"{reader_names}: not shifted, because {', '.join(missing)} has no bias")
        elif not fold_shift(copy.deepcopy(block), link, (high + low) / 2, inputs.probe).is_kept:
            log("note", f"{reader_names}: not shifted, because a shift of {link.source} does not reach them unchanged")
        else:
            shift = (high + low) / 2
        largest = torch.maximum(high.abs(), low.abs()) if shift is None else (high - low) / 2
        scale = smoothing(largest, link.equalize(weight_absmax(block, link.readers)), ALPHA)
        return cls(link, link.equalize(scale), shift, largest)

    @property
    def parameters(self) -> list[Tensor]:
        """The learned tensors."""
        return [self.growth] if self._shift is None else [self.growth, self.offset]

    @property
    def scale(self) -> Float[Tensor, " in"]:
        """The divisor of each input column."""
        return self._scale * self.growth.exp()[self._channels]

    @property
    def shift(self) -> Float[Tensor, " in"] | None:
        """What is subtracted from each input column, or None."""
        return None if self._shift is None else self._shift + self._extent * self.offset[self._channels]

    @torch.no_grad()
    def fold(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        """Move the change into the weights and biases of the block; what changes the block's output is undone."""
        reader_names, shift = ", ".join(self.link.readers), self.shift
        folds = [] if shift is None else [("shift", fold_shift(block, self.link, shift, inputs.probe))]
        folds.append(("scale", fold(block, self.link, self.scale, inputs.probe)))
        for kind, rewrite in folds:
            if not rewrite.is_kept:
                message = f"folding the {kind} into {self.link.source} changed the block's output, so it was undone"
                log("fallback", f"{reader_names}: {message}", relative_error=rewrite.error)


def _weight(block: nn.Module, name: str) -> Float[Tensor, "out in"]:
    return CompressedLinear.of(block.get_submodule(name)).weight.float()


def _learning(
    block: nn.Module,
    clippings: Mapping[str, LearnedClipping],
    changes: Mapping[str, Transformation],
    roundings: Mapping[str, InputRounding | None],
) -> AbstractContextManager[None]:
    """Run the linears with clipped weights and transformed inputs, both rounded with gradients."""
    return with_forwards(block, {n: partial(_clipped, clippings[n], changes.get(n), roundings[n]) for n in clippings})


def _clipped(
    clipping: LearnedClipping,
    change: Transformation | None,
    rounding: InputRounding | None,
    layer: CompressedLinear,
) -> Forward:
    weight = layer.weight.float()

    def forward(x: Tensor) -> Tensor:
        x, scaled, bias = layer.transform(x), weight, layer.bias
        if change is not None:
            # Q((X - z) / s) Q(s W) + (b + z W)  (equation 3)
            scale, shift = change.scale, change.shift
            if shift is not None:
                assert bias is not None
                x, bias = x - shift.to(x.dtype), bias + (weight @ shift).to(bias.dtype)
            x, scaled = x / scale.to(x.dtype), weight * scale
        if rounding is not None:
            x = straight(x, rounding(x))
        return nn.functional.linear(x, clipping.weight(scaled).to(x.dtype), bias)

    return forward
