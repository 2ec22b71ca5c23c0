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
from compress.model.linear import CompressedLinear, linears
from compress.model.structure.blocks import Block

WILD = "*?["
HEAD = "lm_head"
"""The usual name of the output head; recipes name it for every model, whatever its own name for the head is."""


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
    names of the blocks. ends: the output head and the embeddings. widths: the inputs of each linear.
    """

    linears: Mapping[str, frozenset[str]]
    others: Mapping[str, frozenset[str]]
    blocks: tuple[str, ...]
    ends: frozenset[str]
    widths: Mapping[str, int] = field(default_factory=dict)

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
        modules = [m for m in (model.get_output_embeddings(), model.get_input_embeddings()) if m is not None]
        ends = frozenset(name for name, module in model.named_modules() if any(module is end for end in modules))
        widths = {
            f"{b.name}.{name}": CompressedLinear.of(m).shape[1] for b in blocks for name, m in linears(b.module).items()
        }
        return cls(inside, rest, tuple(block.name for block in blocks), ends, widths)

    def block_of(self, name: str) -> int:
        """The index of the block that contains a linear."""
        return next(i for i, block in enumerate(self.blocks) if name.startswith(f"{block}."))

    def targets(self, patterns: Sequence[str], where: str) -> tuple[str, ...]:
        """The same targets with patterns of full names in place of class names.

        Raises TargetError for the head and the embeddings, which no pass works on.
        """
        found: list[str] = []
        for pattern in patterns:
            by_class = self._of_class(pattern)
            found += by_class or [pattern]
            if not by_class and self._outside(pattern, self.ends | {HEAD}):
                raise TargetError(
                    f"{where}: targets pattern {pattern!r} matches the output head or the embeddings, which passes "
                    "do not quantize or prune yet; they work on the linears inside the blocks; remove this pattern"
                )
        return tuple(found)

    def ignored(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """The same ignore patterns for the linears inside the blocks; patterns of other modules only are left out."""
        found: list[str] = []
        for pattern in patterns:
            by_class = self._of_class(pattern)
            if by_class or not self._outside(pattern, {*self.others, HEAD}):
                found += by_class or [pattern]
        return tuple(found)

    def _outside(self, pattern: str, names: Iterable[str]) -> bool:
        """Whether a pattern matches one of these modules, by name or class, but no linear inside the blocks."""
        if any(matches(name, pattern) for name in self.linears):
            return False
        by_class = any(pattern in self.others.get(name, ()) for name in names)
        return by_class or any(matches(name, pattern) for name in names)

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
    kind = type(module)
    if isinstance(module, CompressedLinear):
        kind = Conv1D if module.transposed else nn.Linear
    return frozenset(base.__name__ for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module)
