"""Select modules by patterns: globs ('*.mlp.*') or regular expressions ('re:.*_proj')."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from compress.errors import TargetError, did_you_mean


def matches(name: str, pattern: str) -> bool:
    """Whether a module's full name matches a glob or, after the prefix 're:', a full regular expression."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


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


def _hint(pattern: str, names: list[str]) -> str:
    """Suggest similar names by their last parts, where most mistakes are."""
    leaves = {name.rpartition(".")[2] for name in names}
    return did_you_mean(pattern.rpartition(".")[2].strip("*"), leaves)
