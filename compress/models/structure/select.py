"""Select linears of a model by patterns, names of classes ('Linear'), and names of the embedding and LM head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compress.errors import TargetError
from compress.layers.embedding import CompressedEmbedding, layer_of
from compress.layers.linear import CompressedLinear, linears
from compress.models.computation import is_always_float32
from compress.models.structure.blocks import Block
from compress.models.structure.ends import EMBEDDING, HEAD, End, find_ends
from compress.models.structure.patterns import matches


@dataclass(frozen=True)
class ModuleNames:
    """The modules of a model by full name, each with the names of its classes.

    A pattern that matches linears inside the blocks means these only; another one may name the embedding or LM head.

    Attributes:
        linears: linears inside the blocks. Those with one output, such as the gate of a shared expert, and those that
            a class keeps in float32, such as routers, are not among them: they hold no bytes to save, and servers build
            them without quantization.
        other_modules: all other modules that contain none of these linears.
        blocks: names of the blocks.
        ends: the input embedding and the LM head.
        shapes: (out, in) of each linear, including the embedding and LM head.
    """

    linears: Mapping[str, frozenset[str]]
    other_modules: Mapping[str, frozenset[str]]
    blocks: tuple[str, ...]
    ends: tuple[End, ...]
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, blocks: Sequence[Block]) -> ModuleNames:
        """Collect the names of the modules of a model."""
        layers = {f"{b.name}.{name}": m for b in blocks for name, m in linears(b.module).items()}
        shapes = {name: CompressedLinear.of(module).shape for name, module in layers.items()}
        inside = {
            name: _classes(module)
            for name, module in layers.items()
            if shapes[name][0] > 1 and not is_always_float32(module)
        }
        containers = {name[:end] for name in inside for end, letter in enumerate(name) if letter == "."}
        parts = tuple(f"{name}." for name in inside)
        other_modules = {
            name: _classes(module)
            for name, module in model.named_modules()
            if name and name not in inside and name not in containers and not name.startswith(parts)
        }
        ends = tuple(find_ends(model))
        shapes |= {end.name: layer_of(model.get_submodule(end.name)).shape for end in ends}
        return cls(inside, other_modules, tuple(block.name for block in blocks), ends, shapes)

    def block_of(self, name: str) -> int:
        """Return the index of the block that contains a linear."""
        return next(i for i, block in enumerate(self.blocks) if name.startswith(f"{block}."))

    def targets(self, patterns: Sequence[str], label: str) -> tuple[str, ...]:
        """Replace class names and the names of the embedding and LM head in targets by full names.

        Raises:
            TargetError: if targets name one of a tied embedding and LM head alone.
        """
        for end in self.ends:
            targeted = {name for pattern in patterns for name in self._names(pattern, end)}
            if targeted and (untargeted := [name for name in end.names if name not in targeted]):
                raise TargetError(
                    f"{label}: the output head {end.head} and the embedding {end.embedding} are tied: one tensor "
                    f"serves both, so target both or none: add {untargeted[0]} to targets, or remove {min(targeted)}"
                )
        return self.full(patterns)

    def full(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """Replace class names and the names of the embedding and LM head by full names, both names if they are tied."""
        full_patterns: list[str] = []
        for pattern in patterns:
            ends = [name for end in self.ends if self._names(pattern, end) for name in end.names]
            full_patterns += self._of_class(pattern) or ends or [pattern]
        return tuple(dict.fromkeys(full_patterns))

    def candidates(self, patterns: Sequence[str]) -> list[str]:
        """Return the linears inside the blocks, and the embedding and LM head if patterns name them."""
        return [*self.linears, *(name for end in self.reached(patterns) for name in end.names)]

    def reached(self, patterns: Sequence[str]) -> list[End]:
        """Return the embedding and LM head if patterns name them."""
        return [end for end in self.ends if any(self._names(pattern, end) for pattern in patterns)]

    def _names(self, pattern: str, end: End) -> list[str]:
        """Return the modules of an embedding or LM head that a pattern names: full name, class or name in recipes."""
        if any(matches(name, pattern) for name in self.linears) or self._of_class(pattern):
            return []
        aliases = {HEAD: end.head, EMBEDDING: end.embedding}
        names = {full_name for alias, full_name in aliases.items() if full_name is not None and matches(alias, pattern)}
        names |= {name for name in end.names if matches(name, pattern) or pattern in self.other_modules.get(name, ())}
        return sorted(names)

    def ignored(self, patterns: Sequence[str], ends: Sequence[End] = ()) -> tuple[str, ...]:
        """Return ignore patterns with full names, without those that match only modules outside the blocks.

        Patterns that name one of `ends` stay.
        """
        relevant_patterns = [p for p in patterns if any(self._names(p, end) for end in ends) or not self._outside(p)]
        return self.full(relevant_patterns)

    def _outside(self, pattern: str) -> bool:
        """Return whether a pattern matches, by name or class, only modules outside the blocks."""
        if any(matches(name, pattern) for name in self.linears):
            return False
        if self._of_class(pattern):
            return False
        by_class = any(pattern in classes for classes in self.other_modules.values())
        return by_class or any(matches(name, pattern) for name in (*self.other_modules, HEAD, EMBEDDING))

    def _of_class(self, pattern: str) -> list[str]:
        """Return patterns of the full names of all linears of a class; empty for a pattern that is no such class."""
        names = [name for name, classes in self.linears.items() if pattern in classes]
        if not names or any(matches(name, pattern) for name in self.linears):
            return []
        if len(names) == len(self.linears):
            return ["*"]
        places = sorted((self._place(name), name) for name in names)
        patterns = []
        for place, group in groupby(places, lambda item: item[0]):
            group_names = [name for _, name in group]
            everywhere = sum(self._place(name) == place for name in self.linears) == len(group_names)
            patterns += [f"re:{place}"] if everywhere else group_names
        return patterns

    def _place(self, name: str) -> str:
        """Return a regular expression for the linears at this place in all blocks, also after blocks are removed."""
        block = next(block for block in self.blocks if name.startswith(f"{block}."))
        parent = block.rpartition(".")[0]
        return re.escape(f"{parent}.") + r"\d+" + re.escape(name.removeprefix(block))


def _classes(module: nn.Module) -> frozenset[str]:
    """Return the class names of a module; for a compressed linear, those of the layer that it replaces."""
    kind = type(module.own if isinstance(module, CompressedEmbedding) else module)
    if isinstance(module, CompressedLinear):
        kind = Conv1D if module.transposed else nn.Linear
    return frozenset(base.__name__ for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module)
