"""Run a whole model: its logits and losses, the hidden states between blocks, and passes that skip some blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.errors import NumericError
from compress.models.kinds.batch import Batch, Examples
from compress.models.kinds.contract import ModelKind, required_answer, run_on
from compress.models.structure.blocks import Block, hidden_argument, hidden_of
from compress.numerics.dtypes import is_finite
from compress.numerics.metrics import rows_of_chunk


@contextmanager
def skipping(blocks: Sequence[Block], indices: Collection[int]) -> Iterator[None]:
    """Skip the blocks with these indices: they return their input hidden states."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = hidden_argument(args, kwargs)
        return type(output)((hidden, *output[1:])) if isinstance(output, (tuple, list)) else hidden

    with ExitStack() as stack:
        for block in blocks:
            if block.index in indices:
                stack.callback(block.module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def device_of_model(model: nn.Module) -> torch.device:
    """Return the device of a model. Its blocks may have no weights yet, and a compressed embedding has only buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return next(tensor.device for tensor in tensors if not tensor.is_meta)


def logits_of(model: nn.Module, batch: Batch) -> Float[Tensor, "*batch cells"]:
    """The model's answer (`answer_of`) in float32: its logits, or the last hidden states of an encoder."""
    with torch.no_grad():
        return required_answer(run_on(model, batch.to(device_of_model(model)))).float()


def states(model: nn.Module, blocks: Sequence[Block], batch: Batch) -> list[Tensor]:
    """Return the inputs of the blocks and the output of the last one, [batch, length, width]. Raises NumericError."""
    hidden_states: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states.append(hidden_argument(args, kwargs).float())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        hidden_states.append(hidden_of(output).float())

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(blocks[-1].module.register_forward_hook(after).remove)
        logits_of(model, batch)
    if not is_finite(hidden_states[-1]):
        raise NumericError(f"{blocks[-1].name}: the block's output holds NaN or infinity on the calibration text")
    return hidden_states


@torch.no_grad()
def total_loss(model: nn.Module, example: Batch, lm_objective: ModelKind, row: int) -> tuple[float, int]:
    """Return the sum of the losses over all targets, in nats, and the number of targets.

    Args:
        model: the model.
        example: one sequence.
        lm_objective: makes the targets.
        row: number of the sequence, on which the masks depend.
    """
    shown = Examples((example.to(device_of_model(model)),))
    logits, targets = lm_objective.answers(lm_objective.read(model, shown, [row]).logits, shown, [row])
    rows = rows_of_chunk(logits.shape[-1])
    pairs = zip(logits.split(rows), targets.split(rows), strict=True)
    loss = sum(float(nn.functional.cross_entropy(part.float(), target, reduction="sum")) for part, target in pairs)
    return loss, len(targets)


def mean_loss(model: nn.Module, examples: Examples, lm_objective: ModelKind) -> float:
    """Return the mean loss over all targets, in nats; the model runs one sequence at a time."""
    losses = [total_loss(model, example, lm_objective, i) for i, example in enumerate(examples)]
    return sum(loss for loss, _ in losses) / sum(count for _, count in losses)
