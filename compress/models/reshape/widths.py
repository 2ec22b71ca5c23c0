"""Find the tensor dimensions that a width of the configuration determines, by building models with another width.

Nothing is computed: models are built without weights and their tensor shapes are compared. The caller verifies
numerically that a dimension may be narrowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from compress.errors import ModelError
from compress.layers.linear import CompressedLinear, linears
from compress.models.kinds.contract import text_config
from compress.models.reshape.reconfigure import Path, Shapes, changed, entries, shapes, sketch
from compress.models.structure.blocks import find_blocks

Axes = dict[tuple[str, int], tuple[int, int]]
"""(tensor name, dimension) -> (size before, size after)."""


@dataclass(frozen=True)
class Width:
    """A width that can be changed.

    Attributes:
        edits: edits of the configuration.
        axes: tensor dimensions that the edits narrow.
    """

    edits: Mapping[Path, Any]
    axes: Axes

    def modules(self, side: str, model: PreTrainedModel) -> list[str]:
        """Return the full names of the linears that it narrows on one side: 'in' or 'out' channels."""
        linear_by_name = linears(model)
        places = {name: _side(linear_by_name[name], side) for name in linear_by_name}
        return [name for name, dim in places.items() if (f"{name}.weight", dim) in self.axes]


def _side(linear: Any, side: str) -> int:
    """Return the dimension of the stored weight that holds the input or output channels."""
    return int(CompressedLinear.of(linear).transposed != (side == "in"))


def _axes(model: PreTrainedModel, old_shapes: Shapes, edits: Mapping[Path, Any]) -> Axes | None:
    """Return the dimensions that these edits change; None if the model cannot be built or has other tensors."""
    config = changed(model.config, edits)
    built = None if config is None else sketch(model, config)
    new = {} if built is None else shapes(built)
    if new.keys() != old_shapes.keys() or any(len(new[name]) != len(old) for name, old in old_shapes.items()):
        return None
    return {
        (name, dim): sizes
        for name, old in old_shapes.items()
        for dim, sizes in enumerate(zip(old, new[name], strict=True))
        if sizes[0] != sizes[1]
    }


def _inside(model: PreTrainedModel, axes: Axes) -> bool:
    """Return whether all changed tensors are inside the blocks."""
    prefixes = tuple(f"{block.name}." for block in find_blocks(model))
    return all(name.startswith(prefixes) for name, _ in axes)


def _key(model: PreTrainedModel, common: str) -> Path:
    """Return the place of an entry in this model's configuration, from its common name (`attribute_map`)."""
    config = text_config(model.config)
    return (*_prefix(model), config.attribute_map.get(common, common))


def _prefix(model: PreTrainedModel) -> Path:
    """Return the place of the language model's configuration in that of the whole model."""
    text = text_config(model.config)
    return tuple(key for key, value in vars(model.config).items() if value is text and text is not model.config)


def _head_size(model: PreTrainedModel) -> dict[Path, Any]:
    """Return the head size as an edit, for configurations that derive it from other entries."""
    config = text_config(model.config)
    heads, width = getattr(config, "num_attention_heads", 0), getattr(config, "hidden_size", 0)
    missing = getattr(config, "head_dim", None) is None and heads and width % heads == 0
    return {(*_prefix(model), "head_dim"): width // heads} if missing else {}


def _first(model: PreTrainedModel, tries: Iterator[Mapping[Path, Any]], fits: Callable[[Axes], bool]) -> Width | None:
    """Return the width of the first edits that change any dimension and that `fits` accepts."""
    old_shapes = shapes(model)
    for edits in tries:
        axes = _axes(model, old_shapes, edits)
        if axes and fits(axes):
            return Width(edits, axes)
    return None


def ffn_widths(model: PreTrainedModel, narrower: Callable[[int], int]) -> list[Width]:
    """Return the intermediate widths of feed-forward layers, one per size.

    A candidate is an entry of the configuration whose value equals the number of input channels of a linear in the
    blocks, or an entry that is None because its value is derived.

    Args:
        model: model to narrow.
        narrower: maps a size to the new size.

    Raises:
        ModelError: if the configuration has no such entry.
    """
    hidden = getattr(text_config(model.config), "hidden_size", None)
    blocks = find_blocks(model)
    sizes = {CompressedLinear.of(m).shape[1] for block in blocks for m in linears(block.module).values()}
    values_by_path, widths = entries(model.config), []
    for size in sorted(sizes - {hidden}):
        small = narrower(size)
        stated = [path for path, value in values_by_path.items() if type(value) is int and value == size]
        derived = [path for path, value in values_by_path.items() if value is None]

        def fits(axes: Axes, size: int = size, small: int = small) -> bool:
            is_proportional = all(old % size == 0 and new * size == old * small for old, new in axes.values())
            read = Width({}, axes).modules("in", model)
            return is_proportional and _inside(model, axes) and bool(read)

        width = _first(model, ({path: small} for path in [*stated, *derived]), fits)
        if width is not None:
            widths.append(width)
    if not widths:
        raise ModelError(
            "model: no entry of its configuration sets the width of its feed-forward layers, so they cannot be "
            "narrowed; leave out ffn"
        )
    return widths


def head_width(model: PreTrainedModel, groups: int, remaining: int) -> Width:
    """Return the width of attention with fewer groups of heads.

    Args:
        model: model to narrow.
        groups: number of groups: key-value heads, or single heads.
        remaining: number of groups that are left.

    Raises:
        ModelError: if no configuration has fewer heads of the same size.
    """
    heads = _key(model, "num_attention_heads")
    count, added = getattr(text_config(model.config), "num_attention_heads", 0), _head_size(model)
    numbers = [p for p, v in entries(model.config).items() if type(v) is int and v == groups and p != heads]
    tries = [{heads: count * remaining // groups, path: remaining} for path in numbers]
    if count == groups:
        tries.append({heads: remaining})

    def fits(axes: Axes) -> bool:
        is_proportional = all(old % groups == 0 and new * groups == old * remaining for old, new in axes.values())
        reads, writes = (set(Width({}, axes).modules(side, model)) for side in ("in", "out"))
        return is_proportional and _inside(model, axes) and bool(reads) and len(writes) >= len(reads)

    width = _first(model, iter([*tries, *({**edits, **added} for edits in tries if added)]), fits)
    if width is None:
        raise ModelError(
            f"model: its configuration cannot express {remaining} of {groups} groups of heads, because it derives the "
            "head size from the hidden width; leave out heads"
        )
    return width


def hidden_width(model: PreTrainedModel, narrower: Callable[[int], int]) -> Width:
    """Return the width of the hidden states between blocks.

    Raises:
        ModelError: if no configuration has a smaller hidden width and all other sizes unchanged.
    """
    if text_config(model.config) is not model.config:
        raise ModelError(
            f"model: {type(model).__name__} has further parts, such as a vision model, that write into its hidden "
            "states, so their width cannot change; leave the hidden width unchanged"
        )
    path = _key(model, "hidden_size")
    size, heads = model.config.hidden_size, getattr(model.config, "num_attention_heads", 1)
    small, added = narrower(size), _head_size(model)
    equal_paths = [p for p, v in entries(model.config).items() if type(v) is int and v == size and p != path]

    def width_of(small: int) -> Width | None:
        tries = [{path: small}, *({path: small, equal_path: small} for equal_path in equal_paths)]

        def fits(axes: Axes) -> bool:
            return all(pair == (size, small) for pair in axes.values()) and not _inside(model, axes)

        return _first(model, iter([*tries, *({**edits, **added} for edits in tries if added)]), fits)

    width, near = width_of(small), small // heads * heads
    if width is None and 0 < near < small and width_of(near) is not None:
        raise ModelError(
            f"model: its configuration requires that its {heads} heads divide the hidden width, but {small} is not a "
            f"multiple; use multiple: {heads}, or a fraction that leaves {near} of {size}"
        )
    if width is None:
        raise ModelError(
            f"model: its configuration cannot express {small} of {size} hidden channels, because it derives other "
            "sizes from the hidden width; leave the hidden width unchanged"
        )
    return width
