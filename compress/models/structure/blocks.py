"""Find the blocks of a model: the list of equal modules that the hidden states pass through in order.

Such a list is a stack. Most models have one. A model with an encoder and a decoder has two: the blocks of its encoder,
then those of its decoder, which also read the last hidden states of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import ModelError
from compress.layers.linear import linears


@dataclass(frozen=True)
class Block:
    """One block of a model.

    Attributes:
        index: position, counted over all stacks, in the order in which they run.
        name: full name in the model.
        module: the block.
        stack: number of its stack.
    """

    index: int
    name: str
    module: nn.Module
    stack: int = 0


def find_blocks(model: nn.Module) -> list[Block]:
    """Find the blocks of a model, in order, stack by stack.

    A stack is the entries of the ModuleList that holds the most parameters and is not inside another one. In a model
    with several parts, such as a vision and a language model, only the part with the token embeddings counts. Capturing
    the inputs of the blocks checks later that each block feeds the next.

    Raises:
        ModelError: if the model, or one of its stacks, has no ModuleList with entries, or if blocks share weights.
    """
    blocks: list[Block] = []
    for number, part in enumerate(_parts_with_stacks(model)):
        name, block_list = _largest_list(model, part)
        start = len(blocks)
        blocks += [Block(start + i, f"{name}.{i}", block, number) for i, block in enumerate(block_list)]
    _check_apart(model, blocks)
    return blocks


def _check_apart(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Raise ModelError for blocks with weights in common: compressing one block would change another one."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    user_of: dict[str, tuple[int, str]] = {}
    for block in blocks:
        for leaf, parameter in block.module.named_parameters(f"{block.name}"):
            index, name = user_of.setdefault(tied.get(leaf, leaf), (block.index, leaf))
            identical = user_of.setdefault(f"id {id(parameter)}", (block.index, leaf))
            if index != block.index or identical[0] != block.index:
                name = name if index != block.index else identical[1]
                raise ModelError(
                    f"model: {type(model).__name__} shares weights between its blocks ({name} and {leaf}), but blocks "
                    "are compressed one by one; use another model"
                )


def has_two_stacks(model: nn.Module) -> bool:
    """Return whether a model has an encoder and a decoder."""
    return isinstance(model, PreTrainedModel) and bool(getattr(model.config, "is_encoder_decoder", False))


def stack_of(blocks: Sequence[Block], number: int) -> list[Block]:
    """Return the blocks of a stack."""
    return [block for block in blocks if block.stack == number]


def _parts_with_stacks(model: nn.Module) -> list[list[str]]:
    """Return for each stack the prefixes of the parts of a model that may contain it, the preferred one first."""
    if not isinstance(model, PreTrainedModel) or not has_two_stacks(model):
        return [[*_parts_with_embeddings(model), ""]]
    names = {id(module): name for name, module in model.named_modules()}
    parts = [names.get(id(part)) for part in (model.get_encoder(), model.get_decoder())]
    if None in parts or len({*parts, ""}) < 3:
        raise ModelError(
            f"model: {type(model).__name__} has no separate modules of an encoder and a decoder; use another model"
        )
    return [[f"{name}."] for name in parts]


def _largest_list(model: nn.Module, parts: Sequence[str]) -> tuple[str, nn.ModuleList]:
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    prefixes = tuple(f"{name}." for name in lists)
    outer = {name: module for name, module in lists.items() if not name.startswith(prefixes)}
    inside = ({name: module for name, module in outer.items() if name.startswith(part)} for part in parts)
    lists_in_part = next(filter(None, inside), None)
    if lists_in_part is None:
        raise ModelError(
            f"model: {type(model).__name__} has no list of blocks (no torch.nn.ModuleList with entries); "
            "use a model that is built of repeated blocks"
        )
    return max(lists_in_part.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _parts_with_embeddings(model: nn.Module) -> list[str]:
    """Return the prefixes of the transformers models inside a model with its token embeddings, innermost first."""
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
    """Return the full names of all linears inside the blocks."""
    return [f"{block.name}.{name}" for block in find_blocks(model) for name in linears(block.module)]
