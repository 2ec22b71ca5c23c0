"""Select names of linears by patterns: globs ('*.mlp.*'), leaf names ('down_proj') or 're:.*_proj'."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from compress.errors import TargetError, did_you_mean

WILD = "*?["


def matches(name: str, pattern: str) -> bool:
    """Return whether a module's full name matches a pattern.

    A pattern is a glob, a full regular expression after the prefix 're:', or a name without dots and wildcards, which
    matches the last part of a full name.
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    if is_leaf(pattern):
        return name.rpartition(".")[2] == pattern
    return fnmatch.fnmatchcase(name, pattern)


def is_leaf(pattern: str) -> bool:
    """Return whether a pattern is a single name, without dots and wildcards."""
    return not pattern.startswith("re:") and not set(WILD + ".") & set(pattern)


def chosen(name: str, targets: Sequence[str], ignore: Sequence[str]) -> bool:
    """Return whether a module's full name matches a target and no ignore pattern."""
    return any(matches(name, p) for p in targets) and not any(matches(name, p) for p in ignore)


def select(names: Iterable[str], targets: Sequence[str], ignore: Sequence[str], label: str) -> list[str]:
    """Return the names that match a target and no ignore pattern, in their order.

    Args:
        names: full names of linears.
        targets: patterns of which one must match.
        ignore: patterns of which none may match.
        label: the caller, for the error message ('passes[1] gptq').

    Raises:
        TargetError: if a pattern of either kind matches nothing, or no name is left.
    """
    names = list(names)
    for option, patterns in (("targets", targets), ("ignore", ignore)):
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                raise TargetError(
                    f"{label}: {option} pattern {pattern!r} matches no linear inside the blocks{_hint(pattern, names)}"
                )
    selected = [name for name in names if chosen(name, targets, ignore)]
    if not selected:
        raise TargetError(
            f"{label}: the targets and ignore patterns select none of the {len(names)} linears; "
            "remove an ignore pattern"
        )
    return selected


def _hint(pattern: str, names: Sequence[str]) -> str:
    """Return the pattern to write instead, or names with a similar last part, where most mistakes are."""
    containers = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    if any(matches(container, pattern) for container in containers):
        inner = f"{pattern}\\..*" if pattern.startswith("re:") else f"{'*.' * is_leaf(pattern)}{pattern}.*"
        return f"; for all linears inside of these modules write {inner!r}"
    if pattern.startswith("re:"):
        if any(re.search(pattern[3:], name) for name in names):
            full_pattern = f"re:.*{pattern[3:].removeprefix('^').removesuffix('$')}.*"
            return f"; a regular expression must match the whole name, as {full_pattern!r} does"
        return did_you_mean(re.split(r"[^A-Za-z0-9_]+", pattern.rstrip("$"))[-1], _leaves(names))
    if any(name.endswith(f".{pattern}") for name in names):
        return f"; write the full name, or {'*.' + pattern!r}"
    return did_you_mean(pattern.rpartition(".")[2].strip("*"), _leaves(names))


def _leaves(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}
