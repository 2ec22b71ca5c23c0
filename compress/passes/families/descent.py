"""Gradient descent of learned tensors of a block, whose linears run with another forward pass meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear, replace_linear
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.fake import straight
from compress.passes.contract.layers import BlockInputs
from compress.passes.families.reconstruction import add_gradients, block_error, shares

Forward = Callable[[Tensor], Tensor]
"""The forward pass of a linear: its input to its output."""


@contextmanager
def with_forwards(block: nn.Module, forwards: Mapping[str, Callable[[CompressedLinear], Forward]]) -> Iterator[None]:
    """Replace the forward pass of linears inside the context.

    Args:
        forwards: of each layer, by its name in the block.
    """
    layers = {name: replace_linear(block, name) for name in forwards}
    for name, layer in layers.items():
        layer.forward = forwards[name](layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


def rounded(weight: Tensor | Callable[[], Tensor], rounding: InputRounding | None, layer: CompressedLinear) -> Forward:
    """The forward pass of a linear with this weight, [out, in], and rounded inputs, through which gradients pass.

    weight: or what computes it anew in every call.
    """

    def forward(x: Tensor) -> Tensor:
        x = layer.transform(x)
        if rounding is not None:
            x = straight(x, rounding(x))
        dense = weight if isinstance(weight, Tensor) else weight()
        return nn.functional.linear(x, dense.to(x.dtype), layer.bias)

    return forward


def shuffled(batches: Sequence[int], seed: int) -> Iterator[int]:
    """Yield all batch numbers repeatedly, each time in a new random order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for place in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[place]


@dataclass(frozen=True)
class Descent:
    """Gradient descent on the squared error of a block's output, one batch in each step.

    Attributes:
        targets: the wanted output for each batch.
        judged: the batches whose error decides which state is kept.
    """

    block: nn.Module
    inputs: BlockInputs
    targets: Sequence[Tensor]
    judged: Sequence[int]

    @property
    def error(self) -> float:
        """The relative squared error over the judged batches."""
        return block_error(self.block, self.inputs, self.targets.__getitem__, self.judged)

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        batches: Iterable[int],
        checked: Collection[int],
        before_step: Callable[[int], None] = lambda steps_done: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a step for each batch, then return to the state with the least error of those that were checked.

        Args:
            checked: the numbers of done steps after which the error is measured.
            before_step, after_step: called in every step, with the number of done steps, and once the tensors have
                moved.
        """
        learned = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        weights = shares([len(target) for target in self.targets], self.inputs.processes)
        best: tuple[float, list[Tensor]] | None = None
        if 0 in checked:
            best = self.error, [tensor.detach().clone() for tensor in learned]
        for steps_done, batch in enumerate(batches):
            before_step(steps_done)
            with torch.enable_grad():
                output = self.inputs.forward(self.block, batch).float()
                loss = nn.functional.mse_loss(output, self.targets[batch].float())
                (loss if self.inputs.processes.size == 1 else loss * weights[batch]).backward()
            add_gradients(learned, self.inputs.processes)
            optimizer.step()
            optimizer.zero_grad()
            after_step()
            if steps_done + 1 in checked:
                error = self.error
                if best is None or error < best[0]:
                    best = error, [tensor.detach().clone() for tensor in learned]
        assert best is not None, "no state was checked"
        with torch.no_grad():
            for tensor, best_value in zip(learned, best[1], strict=True):
                tensor.copy_(best_value)
