"""Which dimensions of which tensors a width of the configuration decides: found by building the model with another one.

Nothing is computed: models are built without weights, and the shapes of their tensors compared. That what is found may
be narrowed is proved in numbers by those who do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from compress.errors import ModelError
from compress.model.linear import CompressedLinear, linears
from compress.model.reshape.reconfigure import Path, Shapes, changed, entries, shapes, sketch
from compress.model.structure.blocks import find_blocks

Axes = dict[tuple[str, int], tuple[int, int]]
"""(tensor name, dimension) -> its size before and after."""


@dataclass(frozen=True)
class Width:
    """A width that can be changed. edits: of the configuration. axes: what becomes narrower by them."""

    edits: Mapping[Path, Any]
    axes: Axes

    def modules(self, side: str, model: PreTrainedModel) -> list[str]:
        """Full names of the linears that it makes narrower on the side of their 'in' or their 'out' channels."""
        found = linears(model)
        places = {name: _side(found[name], side) for name in found}
        return [name for name, dim in places.items() if (f"{name}.weight", dim) in self.axes]


def _side(linear: Any, side: str) -> int:
    """The dimension of the stored weight that input or output channels are along."""
    return int(CompressedLinear.of(linear).transposed != (side == "in"))


def _axes(model: PreTrainedModel, held: Shapes, edits: Mapping[Path, Any]) -> Axes | None:
    """What these edits change; None where the model cannot be built, or has other tensors then."""
    config = changed(model.config, edits)
    built = None if config is None else sketch(model, config)
    new = {} if built is None else shapes(built)
    if new.keys() != held.keys() or any(len(new[name]) != len(held[name]) for name in held):
        return None
    pairs = ((name, d, old, now) for name in held for d, (old, now) in enumerate(zip(held[name], new[name])))  # noqa: B905
    return {(name, d): (old, now) for name, d, old, now in pairs if old != now}


def _inside(model: PreTrainedModel, axes: Axes) -> bool:
    """Whether all of it is in the blocks."""
    prefixes = tuple(f"{block.name}." for block in find_blocks(model))
    return all(name.startswith(prefixes) for name, _ in axes)


def _key(model: PreTrainedModel, common: str) -> Path:
    """The entry that transformers knows under a name that all its configurations have."""
    return (model.config.attribute_map.get(common, common),)


def _head_size(model: PreTrainedModel) -> dict[Path, Any]:
    """The size of a head, for configurations that leave it to be derived."""
    heads = getattr(model.config, "num_attention_heads", 0)
    width = getattr(model.config, "hidden_size", 0)
    missing = getattr(model.config, "head_dim", None) is None and heads and width % heads == 0
    return {("head_dim",): width // heads} if missing else {}


def _first(model: PreTrainedModel, tries: Iterator[Mapping[Path, Any]], fits: Callable[[Axes], bool]) -> Width | None:
    """The first edits that do what is wanted, and something at all."""
    held = shapes(model)
    for edits in tries:
        axes = _axes(model, held, edits)
        if axes and fits(axes):
            return Width(edits, axes)
    return None


def ffn_widths(model: PreTrainedModel, narrower: Callable[[int], int]) -> list[Width]:
    """The widths between the matrices of feed-forward layers, one for each size that they have.

    They are entries of the configuration that as many input channels of linears in the blocks equal, or that are None
    while they are derived. narrower: the new size for a size.

    Raises ModelError where there is none.
    """
    hidden = getattr(model.config, "hidden_size", None)
    blocks = find_blocks(model)
    sizes = {CompressedLinear.of(m).shape[1] for block in blocks for m in linears(block.module).values()}
    known, found = entries(model.config), []
    for size in sorted(sizes - {hidden}):
        small = narrower(size)
        named = [path for path, value in known.items() if type(value) is int and value == size]
        derived = [path for path, value in known.items() if value is None]

        def fits(axes: Axes, size: int = size, small: int = small) -> bool:
            whole = all(old % size == 0 and new * size == old * small for old, new in axes.values())
            read = Width({}, axes).modules("in", model)
            return whole and _inside(model, axes) and bool(read)

        width = _first(model, ({path: small} for path in [*named, *derived]), fits)
        if width is not None:
            found.append(width)
    if not found:
        raise ModelError(
            "model: no entry of its configuration says how wide its feed-forward layers are, so they cannot be "
            "narrowed; leave out ffn"
        )
    return found


def head_width(model: PreTrainedModel, groups: int, left: int) -> Width:
    """Attention with `left` of its `groups` groups of heads (of one query head each, where they are not grouped).

    Raises ModelError where no configuration has the same heads in a smaller number.
    """
    heads = _key(model, "num_attention_heads")
    count, added = getattr(model.config, "num_attention_heads", 0), _head_size(model)
    numbers = [p for p, v in entries(model.config).items() if type(v) is int and v == groups and p != heads]
    tries = [{heads: count * left // groups, path: left} for path in numbers]
    if count == groups:
        tries.append({heads: left})

    def fits(axes: Axes) -> bool:
        whole = all(old % groups == 0 and new * groups == old * left for old, new in axes.values())
        reads, writes = (set(Width({}, axes).modules(side, model)) for side in ("in", "out"))
        return whole and _inside(model, axes) and bool(reads) and len(writes) >= len(reads)

    width = _first(model, iter([*tries, *({**edits, **added} for edits in tries if added)]), fits)
    if width is None:
        raise ModelError(
            f"model: its configuration cannot say that {left} of {groups} groups of heads are left: it derives the "
            "size of a head from the hidden width; leave out heads"
        )
    return width


def hidden_width(model: PreTrainedModel, narrower: Callable[[int], int]) -> Width:
    """The width of the hidden states that pass from block to block.

    Raises ModelError where no configuration has a smaller one with all else the same.
    """
    path = _key(model, "hidden_size")
    size, heads = model.config.hidden_size, getattr(model.config, "num_attention_heads", 1)
    small, added = narrower(size), _head_size(model)
    others = [p for p, v in entries(model.config).items() if type(v) is int and v == size and p != path]

    def found(small: int) -> Width | None:
        tries = [{path: small}, *({path: small, other: small} for other in others)]

        def fits(axes: Axes) -> bool:
            return all(pair == (size, small) for pair in axes.values()) and not _inside(model, axes)

        return _first(model, iter([*tries, *({**edits, **added} for edits in tries if added)]), fits)

    width, near = found(small), small // heads * heads
    if width is None and 0 < near < small and found(near) is not None:
        raise ModelError(
            f"model: its {heads} heads do not divide {small} hidden channels, which its configuration asks for; use "
            f"multiple: {heads}, or a share that leaves {near} of {size}"
        )
    if width is None:
        raise ModelError(
            f"model: its configuration cannot say that {small} of {size} hidden channels are left and all else stays: "
            "it derives other sizes from the hidden width; leave the hidden width as it is"
        )
    return width
