"""Block-AP: train all parameters of a block through fake quantization, then fix its codes (Chen 2024)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear, replace_linear
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.rounding import rounding_bytes
from compress.passes.contract.facts import Log, Requirements
from compress.passes.contract.layers import BlockInputs, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.contract.options import OF_THE_WHOLE
from compress.passes.families.learned_rounding import LearnedRoundingPass, RoundingStart
from compress.passes.families.reconstruction import ReconstructionPass, block_error
from compress.train.fake_quantized import LearnedShifts
from compress.train.options import TrainingOptions


class BlockAP(LearnedRoundingPass, ReconstructionPass):
    """Train weights, scales, zero points and norms of a block together with fake quantization, then fix the codes.

    Minimize ||block(X; Q(W)) - target||^2 / ||target||^2 by a few epochs over the batches. Weights have a
    straight-through gradient, scales the gradient of LSQ. This is the first stage of EfficientQAT (section 3.2);
    distill with `train: [scales, norms]` after it is the second.

    The paper starts from rounding to nearest. start: 'gptq' starts from the weights that GPTQ rounds, and from its
    scales. The learned state is kept if the block, in its stored form, has a smaller error than the start. The error is
    that on the held-out batches, or on all batches if none are held out.
    """

    use_for: ClassVar[str] = "2 and 3 bits with one block in memory at a time. Follow it by distill."
    not_for: ClassVar[str] = "8 bits, where gptq loses nothing. Little calibration text, on which it overfits."
    paper: ClassVar[str] = "https://arxiv.org/abs/2407.11062"

    of_the_whole: ClassVar[frozenset[str]] = OF_THE_WHOLE | frozenset(TrainingOptions.model_fields)

    learning_rate: float = Field(
        default=2e-3, gt=0, description="highest rate of norms, and of scales, relative to each scale"
    )
    weight_rate: float = Field(
        default=3.0,
        gt=0,
        description="rate of weights, in steps of their grid, and of biases, relative to learning_rate",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.train is not None and "weights" not in self.train:
            raise ValueError("train must include weights; to learn only scales and norms, use gptq, then lkd")
        if not self.grid.free_scales:
            reason = f"weights {self.weights}: its scales are no plain floats to be learned"
            raise ValueError(f"{reason}; use the pass signround")

    @property
    def requires(self) -> Requirements:
        return replace(super().requires, trains=self.train or ())

    def memory(self, size: ProblemSize) -> int:
        """The maximum over observation, start and training, plus starting weights, a copy of the block and targets."""
        statistics, width = Gram.block_bytes(size), max(size.inputs, default=1)
        start = statistics + rounding_bytes(size.largest // width, width)
        copies = 2 * 4 * size.weights + size.states_bytes * (self.error == "symmetric")
        return copies + max(statistics + size.forward_bytes, start, TrainingOptions.memory(self, size))

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        outputs = [self.target(block, inputs, batch) for batch in range(inputs.batches)]
        targets = outputs.__getitem__
        starts, roundings = self.starts(block, inputs, log), self.roundings(inputs)
        student = copy.deepcopy(block)
        _put(student, {name: start.codes for name, start in starts.items()}, roundings)
        judged = self.judged(inputs.batches)
        error_before = block_error(student, inputs, targets, judged)
        shifts = {name: self._shifts(inputs, name, start) for name, start in starts.items()}
        _put(student, {name: shifts[name].of(start.wanted) for name, start in starts.items()}, roundings)
        steps, norms_and_biases = self.learn(student, inputs, targets, log, lambda name, layer: shifts[name])
        error_after = block_error(student, inputs, targets, judged)
        log("note", "error of the block's output", start=error_before, learned=error_after, steps=steps)
        if error_after < error_before:
            for name in norms_and_biases:
                block.get_parameter(name).data.copy_(student.get_parameter(name).data)
        else:
            message = "training did not reduce the error; the initial rounding is kept"
            log("fallback", message, start=error_before, learned=error_after)
        for name, start in starts.items():
            rounding, learned = roundings[name], student.get_submodule(name)
            assert isinstance(learned, CompressedLinear)
            weight = learned.all_parts if error_after < error_before else start.codes
            inputs.put(name, Solution(weight, transforms=() if rounding is None else (rounding,)))

    def _shifts(self, inputs: BlockInputs, name: str, start: RoundingStart) -> LearnedShifts:
        rounding = self.options_of(inputs, name).grid_options(inputs.layer(name))
        return LearnedShifts(rounding, start.mask, start.wanted, start.codes)


def _put(
    block: nn.Module, weights: Mapping[str, Codes] | Mapping[str, Tensor], roundings: Mapping[str, InputRounding | None]
) -> None:
    """Replace the weights of linears, and round their inputs."""
    for name, weight in weights.items():
        layer, rounding = replace_linear(block, name), roundings[name]
        layer.put(weight)
        if rounding is not None:
            layer.round_inputs(rounding)
