"""Find the blocks of a model: the list of equal modules that the hidden states pass through in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import ModelError
from compress.model.linear import linears


@dataclass(frozen=True)
class Block:
    """One block: its position, its full name in the model, and the module."""

    index: int
    name: str
    module: nn.Module


def find_blocks(model: nn.Module) -> list[Block]:
    """Find the blocks of a model, in order.

    They are the entries of the ModuleList that holds the most parameters and is not inside another one. In a model with
    several parts, such as a vision and a language model, only the part with the token embeddings counts. Capturing the
    inputs of the blocks checks later that each block feeds the next.

    Raises ModelError when the model has no ModuleList with entries.
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outer = {name: module for name, module in lists.items() if not any(name.startswith(other + ".") for other in lists)}
    for part in _parts_with_embeddings(model):
        inside = {name: module for name, module in outer.items() if name.startswith(part)}
        if inside:
            outer = inside
            break
    if not outer:
        raise ModelError(
            f"model: {type(model).__name__} has no list of blocks (no torch.nn.ModuleList with entries); "
            "use a model that is built of repeated blocks"
        )
    name, found = max(outer.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return [Block(i, f"{name}.{i}", block) for i, block in enumerate(found)]


def _parts_with_embeddings(model: nn.Module) -> list[str]:
    """The prefixes of the transformers models inside a model that contain its token embeddings, innermost first."""
    try:
        embeddings = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    except NotImplementedError:  # no token embeddings
        return []
    place = next((name for name, module in model.named_modules() if module is embeddings), "")
    parts = [name + "." for name, module in model.named_modules() if name and isinstance(module, PreTrainedModel)]
    return sorted((part for part in parts if place.startswith(part)), key=len, reverse=True)


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states in a block's output: the tensor itself, or the first element of a tuple."""
    return output[0] if isinstance(output, (tuple, list)) else output


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among a block's arguments: the first one, or the keyword `hidden_states`."""
    return args[0] if args else kwargs["hidden_states"]


def linears_of_blocks(model: nn.Module) -> list[str]:
    """The full names of all linears inside the blocks."""
    return [f"{block.name}.{name}" for block in find_blocks(model) for name in linears(block.module)]
