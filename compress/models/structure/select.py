"""Select linears by patterns: globs ('*.mlp.*'), leaf names ('down_proj'), class names ('Linear') or 're:.*_proj'."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compress.errors import TargetError, did_you_mean
from compress.layers.embedding import CompressedEmbedding, layer_of
from compress.layers.linear import CompressedLinear, linears
from compress.models.structure.blocks import Block
from compress.models.structure.ends import EMBEDDING, HEAD, End, find_ends

WILD = "*?["


def matches(name: str, pattern: str) -> bool:
    """Whether a module's full name matches a pattern.

    A pattern is a glob, a full regular expression after the prefix 're:', or a name without dots and wildcards, which
    matches the last part of a full name.
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    if is_leaf(pattern):
        return name.rpartition(".")[2] == pattern
    return fnmatch.fnmatchcase(name, pattern)


def is_leaf(pattern: str) -> bool:
    """Whether a pattern is a single name, without dots and wildcards."""
    return not pattern.startswith("re:") and not set(WILD + ".") & set(pattern)


def chosen(name: str, targets: Sequence[str], ignore: Sequence[str]) -> bool:
    """Whether a module's full name matches a target and no ignore pattern."""
    return any(matches(name, p) for p in targets) and not any(matches(name, p) for p in ignore)


def select(names: Iterable[str], targets: Sequence[str], ignore: Sequence[str], where: str) -> list[str]:
    """Return the names that match a target and no ignore pattern, in their given order.

    where: the caller, for the error message ('passes[1] gptq').

    Raises TargetError when a pattern of either kind matches nothing, or when no name is left.
    """
    names = list(names)
    for option, patterns in (("targets", targets), ("ignore", ignore)):
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                raise TargetError(
                    f"{where}: {option} pattern {pattern!r} matches no linear inside the blocks{_hint(pattern, names)}"
                )
    found = [name for name in names if chosen(name, targets, ignore)]
    if not found:
        raise TargetError(
            f"{where}: the targets and ignore patterns select none of the {len(names)} linears; "
            "remove an ignore pattern"
        )
    return found


def _hint(pattern: str, names: Sequence[str]) -> str:
    """The pattern to write instead, or names that are similar in their last parts, where most mistakes are."""
    containers = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    if any(matches(container, pattern) for container in containers):
        inner = f"{pattern}\\..*" if pattern.startswith("re:") else f"{'*.' * is_leaf(pattern)}{pattern}.*"
        return f"; for all linears inside of these modules write {inner!r}"
    if pattern.startswith("re:"):
        if any(re.search(pattern[3:], name) for name in names):
            whole = f"re:.*{pattern[3:].removeprefix('^').removesuffix('$')}.*"
            return f"; a regular expression must match the whole name, as {whole!r} does"
        return did_you_mean(re.split(r"[^A-Za-z0-9_]+", pattern.rstrip("$"))[-1], _leaves(names))
    if any(name.endswith(f".{pattern}") for name in names):
        return f"; write the full name, or {'*.' + pattern!r}"
    return did_you_mean(pattern.rpartition(".")[2].strip("*"), _leaves(names))


def _leaves(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@dataclass(frozen=True)
class ModuleNames:
    """The modules of a model by full name, each with the names of its classes.

    linears: the linears inside the blocks. others: all other modules that contain none of these linears. blocks: the
    names of the blocks. ends: the input embedding and the output head. A pattern that matches linears inside the blocks
    means these only; another one may name an end. shapes: (out, in) of each linear, ends included.
    """

    linears: Mapping[str, frozenset[str]]
    others: Mapping[str, frozenset[str]]
    blocks: tuple[str, ...]
    ends: tuple[End, ...]
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, blocks: Sequence[Block]) -> ModuleNames:
        """The names of the modules of a model."""
        inside = {f"{b.name}.{name}": _classes(m) for b in blocks for name, m in linears(b.module).items()}
        containers = {name[:end] for name in inside for end, letter in enumerate(name) if letter == "."}
        parts = tuple(f"{name}." for name in inside)
        rest = {
            name: _classes(module)
            for name, module in model.named_modules()
            if name and name not in inside and name not in containers and not name.startswith(parts)
        }
        shapes = {
            f"{b.name}.{name}": CompressedLinear.of(m).shape for b in blocks for name, m in linears(b.module).items()
        }
        ends = tuple(find_ends(model))
        shapes |= {end.name: layer_of(model.get_submodule(end.name)).shape for end in ends}
        return cls(inside, rest, tuple(block.name for block in blocks), ends, shapes)

    def block_of(self, name: str) -> int:
        """The index of the block that contains a linear."""
        return next(i for i, block in enumerate(self.blocks) if name.startswith(f"{block}."))

    def targets(self, patterns: Sequence[str], where: str) -> tuple[str, ...]:
        """The same targets with full names in place of class names and of the names of ends.

        Raises TargetError for targets that name one of two tied ends alone.
        """
        for end in self.ends:
            named = {name for pattern in patterns for name in self._names(pattern, end)}
            if named and (other := [name for name in end.names if name not in named]):
                raise TargetError(
                    f"{where}: the output head {end.head} and the embedding {end.embedding} are tied: one tensor "
                    f"serves both, so target both or none: add {other[0]} to targets, or remove {min(named)}"
                )
        return self.full(patterns)

    def full(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """The same patterns with full names in place of class names and of the names of ends; tied ends get both."""
        found: list[str] = []
        for pattern in patterns:
            ends = [name for end in self.ends if self._names(pattern, end) for name in end.names]
            found += self._of_class(pattern) or ends or [pattern]
        return tuple(dict.fromkeys(found))

    def candidates(self, patterns: Sequence[str]) -> list[str]:
        """Return the linears inside the blocks, and the embedding and LM head if patterns name them."""
        return [*self.linears, *(name for end in self.reached(patterns) for name in end.names)]

    def reached(self, patterns: Sequence[str]) -> list[End]:
        """The ends that patterns name."""
        return [end for end in self.ends if any(self._names(pattern, end) for pattern in patterns)]

    def _names(self, pattern: str, end: End) -> list[str]:
        """The modules of an end that a pattern names, by full name, class, or the names of recipes for all models."""
        if any(matches(name, pattern) for name in self.linears) or self._of_class(pattern):
            return []
        aliases = {HEAD: end.head, EMBEDDING: end.embedding}
        found = {own for alias, own in aliases.items() if own is not None and matches(alias, pattern)}
        found |= {name for name in end.names if matches(name, pattern) or pattern in self.others.get(name, ())}
        return sorted(found)

    def ignored(self, patterns: Sequence[str], ends: Sequence[End] = ()) -> tuple[str, ...]:
        """The same ignore patterns for linears inside the blocks and these ends, without those of other modules."""
        known = [p for p in patterns if any(self._names(p, end) for end in ends) or not self._outside(p)]
        return self.full(known)

    def _outside(self, pattern: str) -> bool:
        """Whether a pattern matches a module outside, by name or class, but no linear inside the blocks."""
        if any(matches(name, pattern) for name in self.linears):
            return False
        if self._of_class(pattern):
            return False
        by_class = any(pattern in classes for classes in self.others.values())
        return by_class or any(matches(name, pattern) for name in (*self.others, HEAD, EMBEDDING))

    def _of_class(self, pattern: str) -> list[str]:
        """Patterns of the full names of all linears of a class; empty for a pattern that is no such class."""
        names = [name for name, classes in self.linears.items() if pattern in classes]
        if not names or any(matches(name, pattern) for name in self.linears):
            return []
        if len(names) == len(self.linears):
            return ["*"]
        places = sorted((self._place(name), name) for name in names)
        found = []
        for place, group in groupby(places, lambda item: item[0]):
            here = [name for _, name in group]
            everywhere = sum(self._place(name) == place for name in self.linears) == len(here)
            found += [f"re:{place}"] if everywhere else here
        return found

    def _place(self, name: str) -> str:
        """A regular expression for the linears at this place in all blocks; it also holds where blocks are removed."""
        block = next(block for block in self.blocks if name.startswith(f"{block}."))
        parent = block.rpartition(".")[0]
        return re.escape(f"{parent}.") + r"\d+" + re.escape(name.removeprefix(block))


def _classes(module: nn.Module) -> frozenset[str]:
    """The names of the classes of a module; for a compressed linear, those of the layer that it replaces."""
    kind = type(module.own if isinstance(module, CompressedEmbedding) else module)
    if isinstance(module, CompressedLinear):
        kind = Conv1D if module.transposed else nn.Linear
    return frozenset(base.__name__ for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module)
