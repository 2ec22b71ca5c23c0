"""SignRound: learn to round up or down, block by block, by a few steps of gradient descent (Cheng 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.api.facts import Log, Requirements
from compress.api.layers import BlockInputs, Layer, Solution
from compress.api.memory import ProblemSize
from compress.api.observers import Gram
from compress.api.passes import BlockPass
from compress.families.quantizing import Quantizing
from compress.families.reconstruction import ErrorName, add_gradients, block_error, shares
from compress.model.linear import CompressedLinear, replace_linear
from compress.numerics.linalg import DAMPING
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.learned import LearnedRounding, learned_bytes
from compress.numerics.quant.rounding import round_columns, rounding_bytes
from compress.numerics.quant.weighted_search import importance_of
from compress.weights.transforms.rounding import InputRounding

ADAM_RATE = 0.01  # of the shifts, with start: gptq; tuned on the first blocks of one model
CHECKS = 5  # evenly spaced iterates whose error over all batches is measured; the best one is kept


class SignRound(Quantizing, BlockPass):
    """Learn the rounding of every weight by gradient descent, block by block.

    Minimize ||block(X; W~) - target||^2 over a shift of every weight (up to half a step) and a factor per scale.
    The target is the uncompressed model's activations after the block (error: asymmetric), or the output of the
    unrounded block for the same inputs (symmetric). start: 'gptq' starts from the result of GPTQ, 'rtn' from the
    original weights as in the paper. optimizer: 'sign' is the signed gradient descent of the paper. Of several
    iterates, the one with the least error over all batches is kept; the start, if no error is less.
    """

    use_for: ClassVar[str] = (
        "4 bits and fewer with more time than gptq takes: rounding itself is learned, block by block."
    )
    not_for: ClassVar[str] = "Little calibration text, on which it overfits."
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.05516"
    repeats: ClassVar[str | None] = "iterations"

    iterations: int = Field(default=50, ge=1, description="steps per block, each on one calibration batch")
    start: Literal["gptq", "rtn"] = Field(default="gptq", description="start of the learned rounding")
    optimizer: Literal["adam", "sign"] = Field(default="adam", description="optimizer; 'sign' is that of the paper")
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description=f"of the shifts, decays to 0; default {ADAM_RATE} (adam), 1 / iterations (sign, as in AutoRound: "
        "a shift can move by half a step)",
    )
    scale_rate: float = Field(default=0.1, ge=0, description="rate of the scales, relative to learning_rate")
    error: ErrorName = Field(
        default="asymmetric",
        description="target of the block's output: 'asymmetric': of the uncompressed model, which runs too; "
        "'symmetric': of the original block on the same inputs",
    )
    seed: int = Field(default=0, ge=0, description="seed of the order of the batches")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.activation_scale != "token":
            raise ValueError(f"activation_scale: {self.activation_scale} is not supported by this pass; use token")

    def without_effect(self) -> dict[str, str]:
        idle = {"scale_rate": f"with weights {self.weights}, whose scales are no plain floats and stay; leave it out"}
        return super().without_effect() | ({} if self.grid.scaling.free else idle)

    @property
    def weighs_columns(self) -> bool:
        return self.start == "gptq"

    @property
    def rate(self) -> float:
        """The first rate of the shifts."""
        return self.learning_rate or (ADAM_RATE if self.optimizer == "adam" else 1 / self.iterations)

    @property
    def requires(self) -> Requirements:
        return Requirements(data=True, reference=self.error == "asymmetric", batches=True)

    def memory(self, size: ProblemSize) -> int:
        """The maximum over observation, start and learning, plus the target outputs."""
        seen, width = sum(map(Gram.memory_bytes, size.inputs)), max(size.inputs, default=1)
        start = learned_bytes(size.weights, None) + seen + rounding_bytes(size.largest // width, width)
        learn = learned_bytes(size.weights, 2 if self.optimizer == "adam" else 0) + 4 * size.length * size.passed
        targets = size.states_bytes if self.error == "symmetric" else 0
        return targets + max(seen + size.forward_bytes, start, learn)

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        targets = [self._target(block, inputs, batch) for batch in range(inputs.batches)]
        learned = self._start_all(block, inputs, log)
        roundings = {name: self._rounding(inputs, name) for name in learned}
        with _with_weights(block, {name: item.start.dense() for name, item in learned.items()}, roundings):
            before = block_error(block, inputs, targets.__getitem__, range(inputs.batches))
        with _with_weights(block, learned, roundings):
            self._learn(block, inputs, targets, list(learned.values()))
        codes = {name: item.codes(inputs.layer(name).storage) for name, item in learned.items()}
        with _with_weights(block, {name: item.dense() for name, item in codes.items()}, roundings):
            after = block_error(block, inputs, targets.__getitem__, range(inputs.batches))
        log("note", "error of the block's output", start=before, learned=after)
        if not after < before:
            log(
                "fallback",
                "learning did not reduce the error; the initial rounding is kept",
                start=before,
                learned=after,
            )
            codes = {name: item.start for name, item in learned.items()}
        for name, item in codes.items():
            rounding = roundings[name]
            inputs.put(name, Solution(item, transforms=() if rounding is None else (rounding,)))

    def _target(self, block: nn.Module, inputs: BlockInputs, batch: int) -> Tensor:
        return inputs.reference(batch) if self.error == "asymmetric" else inputs.forward(block, batch)

    def _options_of(self, inputs: BlockInputs, name: str) -> SignRound:
        return self.for_layer(inputs.layer(name).name) or self

    def _rounding(self, inputs: BlockInputs, name: str) -> InputRounding | None:
        """The rounding of a linear's inputs, or None."""
        return self._options_of(inputs, name).rounding(inputs.layer(name))

    def _start_all(self, block: nn.Module, inputs: BlockInputs, log: Log) -> dict[str, LearnedRounding]:
        """Round every linear of the pass as a start."""
        seen = inputs.observe(Gram)
        found: dict[str, LearnedRounding] = {}
        for group in inputs.groups:
            names = [name for name in group.linears if name in inputs.names]
            weights = {name: CompressedLinear.of(block.get_submodule(name)).weight.float() for name in names}
            shared_absmax = max(float(weight.abs().max()) for weight in weights.values())
            for name, weight in weights.items():
                gram = seen[group] if self.start == "gptq" and seen[group].tokens else None
                if self.start == "gptq" and gram is None:
                    log(
                        "fallback",
                        f"{name}: no calibration token reached this layer; it starts from rounding to nearest",
                    )
                found[name] = self._options_of(inputs, name).begin(weight, gram, inputs.layer(name), shared_absmax)
        return found

    def begin(
        self, weight: Tensor, seen: Gram | None, layer: Layer, shared_absmax: float | None = None
    ) -> LearnedRounding:
        """Round a weight as a start: to nearest, or by GPTQ with static order if `seen` is given."""
        mask, dtype, signed = layer.mask, layer.storage, self.signed(layer)
        if seen is None:
            search = "mse" if self.scale == "importance" else self.scale  # no token reached the layer
            start = quantize(
                weight, self.grid, self.group_size, self.symmetric, search, mask, dtype, shared_absmax, signed=signed
            )
            return LearnedRounding(weight, start, mask)
        order = seen.diagonal.argsort(descending=True, stable=True)
        factor = seen.factor_of(layer.name, layer.log, DAMPING, order)
        known = importance_of(factor, order) if self.scale == "importance" else None
        options = replace(self.grid_options(layer), shared_absmax=shared_absmax, importance=known)
        found = round_columns(weight, factor, options, mask, order, keep_wanted=True)
        return LearnedRounding(found.wanted, found.codes, mask)

    def _learn(
        self, block: nn.Module, inputs: BlockInputs, targets: list[Tensor], learned: list[LearnedRounding]
    ) -> None:
        rate = self.rate
        shifts = [item.shift for item in learned]
        factors = [item.factor for item in learned if item.factor.requires_grad]
        stepper = _STEPPERS[self.optimizer]([{"params": shifts, "lr": rate}, {"params": factors, "lr": rate}])
        order = _batches(inputs.batches, self.seed)
        weights = shares([len(target) for target in targets], inputs.processes)
        checked = {self.iterations * part // CHECKS for part in range(1, CHECKS + 1)}
        best: tuple[float, list[Tensor]] | None = None
        for iteration in range(self.iterations):
            now = rate * (1 - iteration / self.iterations)
            for group, part in zip(stepper.param_groups, (1.0, self.scale_rate), strict=True):
                group["lr"] = now * part
            batch = next(order)
            with torch.enable_grad():
                loss = nn.functional.mse_loss(inputs.forward(block, batch).float(), targets[batch].float())
                (loss if inputs.processes.size == 1 else loss * weights[batch]).backward()
            add_gradients((*shifts, *factors), inputs.processes)
            stepper.step()
            stepper.zero_grad()
            for item in learned:
                item.limit()
            if iteration + 1 in checked:
                error = block_error(block, inputs, targets.__getitem__, range(inputs.batches))
                if best is None or error < best[0]:
                    best = error, [parameter.detach().clone() for parameter in (*shifts, *factors)]
        assert best is not None
        with torch.no_grad():
            for parameter, kept in zip((*shifts, *factors), best[1], strict=True):
                parameter.copy_(kept)


class _Sign(torch.optim.Optimizer):
    """Signed gradient descent: each step is the rate times the sign of the gradient (AutoRound, algorithm 1)."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # an expert without tokens in this batch
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


_STEPPERS: dict[str, Any] = {"adam": torch.optim.Adam, "sign": _Sign}


def _batches(count: int, seed: int) -> Iterator[int]:
    """Yield all batch numbers repeatedly, each time in a new random order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


@contextmanager
def _with_weights(
    block: nn.Module,
    weights: Mapping[str, LearnedRounding] | Mapping[str, Tensor],
    roundings: Mapping[str, InputRounding | None],
) -> Iterator[None]:
    """Run the linears with these weights and with rounded inputs inside of the context."""
    layers = {name: replace_linear(block, name) for name in weights}
    for name, layer in layers.items():
        layer.forward = _forward(layer, weights[name], roundings[name])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


def _forward(layer: CompressedLinear, weight: LearnedRounding | Tensor, rounding: InputRounding | None) -> Any:
    def forward(x: Tensor) -> Tensor:
        x = layer.transform(x)
        if rounding is not None:
            x = x + (rounding(x) - x).detach()
        dense = weight.weight() if isinstance(weight, LearnedRounding) else weight
        return nn.functional.linear(x, dense.to(x.dtype), layer.bias)

    return forward
