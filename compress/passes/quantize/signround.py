"""SignRound: learn to round up or down, block by block, by a few steps of gradient descent (Cheng 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.learned import LearnedRounding, learned_bytes
from compress.numerics.quant.rounding import rounding_bytes
from compress.passes.contract.facts import Log
from compress.passes.contract.layers import BlockInputs, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.descent import Descent, rounded, shuffled, with_forwards
from compress.passes.families.learned_rounding import LearnedRoundingPass

ADAM_RATE = 0.01  # of the shifts, with start: gptq; tuned on the first blocks of one model
CHECKS = 5  # evenly spaced iterates whose error over all batches is measured; the best one is kept


class SignRound(LearnedRoundingPass):
    """Learn the rounding of every weight by gradient descent, block by block.

    Minimize ||block(X; W~) - target||^2 over a shift of every weight (up to half a step) and a factor per scale. The
    target is the uncompressed model's activations after the block (error: asymmetric), or the output of the unrounded
    block for the same inputs (symmetric).

    start: 'gptq' starts from the result of GPTQ, 'rtn' from the original weights as in the paper. optimizer: 'sign' is
    the signed gradient descent of the paper. Of several iterates, the one with the least error over all batches is
    kept, or the start if no error is less.
    """

    use_for: ClassVar[str] = (
        "4 bits and fewer with more time than gptq takes: the rounding itself is learned, block by block."
    )
    not_for: ClassVar[str] = "Little calibration text, on which it overfits."
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.05516"
    repeats: ClassVar[str | None] = "iterations"

    iterations: int = Field(default=50, ge=1, description="steps per block, each on one calibration batch")
    optimizer: Literal["adam", "sign"] = Field(default="adam", description="optimizer; 'sign' is that of the paper")
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description=f"of the shifts, decays to 0; default {ADAM_RATE} (adam), 1 / iterations (sign, as in AutoRound: "
        "a shift can move by half a step)",
    )
    scale_rate: float = Field(default=0.1, ge=0, description="rate of the scales, relative to learning_rate")
    seed: int = Field(default=0, ge=0, description="seed of the order of the batches")

    def without_effect(self) -> dict[str, str]:
        idle = {"scale_rate": f"with weights {self.weights}, whose scales are no plain floats and stay; leave it out"}
        return super().without_effect() | ({} if self.grid.scaling.free else idle)

    @property
    def rate(self) -> float:
        """The first rate of the shifts."""
        return self.learning_rate or (ADAM_RATE if self.optimizer == "adam" else 1 / self.iterations)

    def memory(self, size: ProblemSize) -> int:
        """Return the maximum over observation, start and learning, plus the target outputs."""
        statistics, width = Gram.block_bytes(size), max(size.inputs, default=1)
        start = learned_bytes(size.weights, None) + statistics + rounding_bytes(size.largest // width, width)
        learn = learned_bytes(size.weights, 2 if self.optimizer == "adam" else 0) + 4 * size.length * size.passed
        targets = size.states_bytes if self.error == "symmetric" else 0
        return targets + max(statistics + size.forward_bytes, start, learn)

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        batch_numbers = range(inputs.batches)
        descent = Descent(block, inputs, [self.target(block, inputs, batch) for batch in batch_numbers], batch_numbers)
        starts, roundings = self.starts(block, inputs, log), self.roundings(inputs)
        learned = {name: LearnedRounding(start.wanted, start.codes, start.mask) for name, start in starts.items()}
        with _with_weights(block, {name: item.start.dense() for name, item in learned.items()}, roundings):
            error_before = descent.error
        with _with_weights(block, {name: item.weight for name, item in learned.items()}, roundings):
            self._learn(descent, list(learned.values()))
        codes = {name: item.codes(inputs.layer(name).storage) for name, item in learned.items()}
        with _with_weights(block, {name: item.dense() for name, item in codes.items()}, roundings):
            error_after = descent.error
        log("note", "error of the block's output", start=error_before, learned=error_after)
        if not error_after < error_before:
            log(
                "fallback",
                "learning did not reduce the error; the initial rounding is kept",
                start=error_before,
                learned=error_after,
            )
            codes = {name: item.start for name, item in learned.items()}
        for name, item in codes.items():
            rounding = roundings[name]
            inputs.put(name, Solution(item, transforms=() if rounding is None else (rounding,)))

    def _learn(self, descent: Descent, learned: Sequence[LearnedRounding]) -> None:
        rate = self.rate
        shifts = [item.shift for item in learned]
        factors = [item.factor for item in learned if item.factor.requires_grad]
        stepper = _STEPPERS[self.optimizer]([{"params": shifts, "lr": rate}, {"params": factors, "lr": rate}])

        def decay(steps_done: int) -> None:
            current_rate = rate * (1 - steps_done / self.iterations)
            for group, part in zip(stepper.param_groups, (1.0, self.scale_rate), strict=True):
                group["lr"] = current_rate * part

        def limit() -> None:
            for item in learned:
                item.limit()

        batches = islice(shuffled(descent.judged, self.seed), self.iterations)
        checked = {self.iterations * part // CHECKS for part in range(1, CHECKS + 1)} - {0}
        descent.run(stepper, batches, checked, decay, limit)


class _Sign(torch.optim.Optimizer):
    """Signed gradient descent: each step is the rate times the sign of the gradient (AutoRound, algorithm 1)."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # torch declares one result for each kind of closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # an expert without tokens in this batch
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


_STEPPERS: dict[str, Any] = {"adam": torch.optim.Adam, "sign": _Sign}


def _with_weights(
    block: nn.Module,
    weights: Mapping[str, Tensor] | Mapping[str, Callable[[], Tensor]],
    roundings: Mapping[str, InputRounding | None],
) -> AbstractContextManager[None]:
    """Run the linears with these weights and with rounded inputs inside of the context."""
    return with_forwards(block, {name: partial(rounded, weights[name], roundings[name]) for name in weights})
