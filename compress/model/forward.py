"""A model run as a whole: its logits and losses, the hidden states between blocks, some of the blocks passed by."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compress.errors import NumericError
from compress.model.objective import LMObjective, without_cache
from compress.model.open.opening import is_finite
from compress.model.structure.blocks import Block, hidden_given, hidden_of

ROWS = 128  # positions whose loss is computed at a time: a whole window's log-softmax would double the peak memory


@contextmanager
def skipping(blocks: Sequence[Block], some: Collection[int]) -> Iterator[None]:
    """The blocks of these numbers pass hidden states on as they are."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = hidden_given(args, kwargs)
        return type(output)((hidden, *output[1:])) if isinstance(output, (tuple, list)) else hidden

    with ExitStack() as stack:
        for block in blocks:
            if block.index in some:
                stack.callback(block.module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def logits_of(model: nn.Module, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length vocab"]:
    """The model's logits, in float32."""
    with torch.no_grad():
        return model(input_ids=ids.to(next(model.parameters()).device), **without_cache(model)).logits.float()


def states(model: nn.Module, blocks: Sequence[Block], ids: Int[Tensor, "batch length"]) -> list[Tensor]:
    """The input of every block and the output of the last, [batch, length, width] each. Raises NumericError."""
    found: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(hidden_given(args, kwargs).float())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        found.append(hidden_of(output).float())

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(blocks[-1].module.register_forward_hook(after).remove)
        logits_of(model, ids)
    if not is_finite(found[-1]):
        raise NumericError(f"{blocks[-1].name}: the block's output holds NaN or infinity on the calibration text")
    return found


@torch.no_grad()
def total_loss(model: nn.Module, ids: Int[Tensor, " length"], lm_objective: LMObjective, row: int) -> tuple[float, int]:
    """The sum of the losses, in nats, of the tokens that are asked for, and their number.

    row: the number of the sequence among all, on which masks depend.
    """
    shown = ids[None].to(next(model.parameters()).device)
    logits, targets = lm_objective.answers(lm_objective.read(model, shown, [row]).logits, shown, [row])
    pairs = zip(logits.split(ROWS), targets.split(ROWS), strict=True)
    found = sum(float(nn.functional.cross_entropy(part.float(), wanted, reduction="sum")) for part, wanted in pairs)
    return found, len(targets)


def mean_loss(model: nn.Module, ids: Int[Tensor, "sequences length"], lm_objective: LMObjective) -> float:
    """Mean loss of the tokens that are asked for, in nats, a sequence at a time."""
    found = [total_loss(model, row, lm_objective, i) for i, row in enumerate(ids)]
    return sum(loss for loss, _ in found) / sum(count for _, count in found)
