"""Finding the blocks of a model: the list of equal modules that hidden states pass through one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compress.errors import ModelError


@dataclass(frozen=True)
class Block:
    """One block: its position, its full name in the model, and the module."""

    index: int
    name: str
    module: nn.Module


def find_blocks(model: nn.Module) -> list[Block]:
    """The blocks of a model, in order.

    They are the entries of the ModuleList (not inside another one) that holds the most parameters. Whether they are
    really chained is checked when their inputs are captured.

    Raises ModelError when the model has no ModuleList with something in it.
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outer = {name: module for name, module in lists.items() if not any(name.startswith(other + ".") for other in lists)}
    if not outer:
        raise ModelError(
            f"model: {type(model).__name__} has no list of blocks (no torch.nn.ModuleList); "
            "compress works on models built of repeated blocks"
        )
    name, found = max(outer.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return [Block(i, f"{name}.{i}", block) for i, block in enumerate(found)]


def hidden_of(output: Any) -> Tensor:
    """The hidden states in what a block returned: the tensor itself, or the first of a tuple."""
    return output[0] if isinstance(output, (tuple, list)) else output


def hidden_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a block is called with: the first argument, or the one of that name."""
    return args[0] if args else kwargs["hidden_states"]
