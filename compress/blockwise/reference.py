"""Run the uncompressed model in parallel with the compressed one: the same batches, stopped at the same linears.

A layer pass that requires the reference compares a layer's inputs X, which come from compressed layers, with its inputs
X~ in the uncompressed model (GPTAQ, Li 2025, section 3.1). Other passes do not use this module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import greenlet
from torch import Tensor, nn

from compress.errors import TargetError

Module = TypeVar("Module", bound=nn.Module)


def twin(block: Module) -> Module:
    """Copy a block and share all its tensors. The copy is not affected when a weight of the block is replaced."""
    return copy.deepcopy(block, {id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())})


class ReferenceBlock:
    """Forward passes of the uncompressed block, one per batch, each advanced only as far as its rows are needed."""

    def __init__(
        self,
        block: nn.Module,
        stages: Sequence[Sequence[str]],
        forwards: Sequence[Callable[[], Tensor]],
        tokens: Sequence[Collection[int]],
    ) -> None:
        self._tokens = tokens
        self._batches = [greenlet.greenlet(forward) for forward in forwards]
        self._outputs: dict[int, Tensor] = {}
        self._index: dict[greenlet.greenlet, int] = {}
        self._caller = greenlet.getcurrent()
        for stage, names in enumerate(stages):
            for name in names:
                block.get_submodule(name).register_forward_pre_hook(self._hook(stage))

    def _hook(self, stage: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._caller.switch((stage, args[0].reshape(-1, args[0].shape[-1])))

        return hook

    def paired(self, index: int, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Register the forward pass of batch `index` through the compressed block, so that `rows` finds its batch."""

        def run() -> Tensor:
            self._index[greenlet.getcurrent()] = index
            return forward()

        return run

    def rows(self, stage: int, name: str, rows: Tensor, routed: Tensor | None = None) -> Tensor:
        """Return the inputs of a stage in the uncompressed model [tokens, in] for the batch of `rows`.

        Args:
            stage: index of the stage.
            name: full name of the linear.
            rows: inputs in the compressed model.
            routed: indices of the tokens in `rows`, for a linear of an expert. In the uncompressed model it computes
                all tokens, because its router may choose other experts for some of them.

        Raises:
            TargetError: if the layer does not get every token of the batch, so that rows cannot be paired.
        """
        index = self._index[greenlet.getcurrent()]
        tokens = self._tokens[index]
        reference_rows = self._advance(index, stage) if routed is not None or rows.shape[0] in tokens else None
        if routed is not None and reference_rows is not None and reference_rows.shape[0] in tokens:
            reference_rows = reference_rows[routed]
        if reference_rows is None or reference_rows.shape != rows.shape:
            raise TargetError(
                f"{name}: sees {rows.shape[0]} of {max(tokens)} tokens, so its inputs cannot be compared with those of "
                "the uncompressed model; leave it out (ignore), or turn the comparison off in the pass"
            )
        return reference_rows

    def output(self, index: int) -> Tensor:
        """Complete the forward pass of a batch, and return the output of the block."""
        self._advance(index, None)
        return self._outputs.pop(index)

    def _advance(self, index: int, target_stage: int | None) -> Tensor | None:
        """Advance a forward pass to a stage (or to its end) and return the rows there; None if it never reaches it."""
        batch, self._caller = self._batches[index], greenlet.getcurrent()
        while not batch.dead:
            batch.parent = self._caller
            stop = batch.switch()
            if batch.dead:
                self._outputs[index] = stop
            elif stop[0] == target_stage:
                return stop[1]
        return None
