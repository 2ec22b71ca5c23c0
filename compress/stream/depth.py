"""A model with some of its blocks passed by, and the hidden states between all blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compress.errors import NumericError
from compress.model.blocks import Block
from compress.model.open import is_finite
from compress.stream.capture import hidden_given, hidden_of

ROWS = 128  # positions whose loss is computed at a time


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
    takes_cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with torch.no_grad():
        return model(input_ids=ids.to(next(model.parameters()).device), **takes_cache).logits.float()


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


def mean_loss(
    model: nn.Module, ids: Int[Tensor, "sequences length"], tell: Callable[[int, int], None] | None = None
) -> float:
    """Mean next-token loss in nats, a sequence at a time. tell(done, of)."""
    total = 0.0
    for i, row in enumerate(ids):
        logits, targets = logits_of(model, row[None])[0, :-1], row[1:].to(next(model.parameters()).device)
        for part, wanted in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
            total += float(nn.functional.cross_entropy(part, wanted, reduction="sum"))
        if tell is not None:
            tell(i + 1, len(ids))
    return total / (ids.shape[0] * (ids.shape[1] - 1))
