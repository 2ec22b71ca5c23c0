"""Accepted: the closed list of keys of a config that a reader understands, with the values that it reads.

A reader that ignored another key or value would compute another model than the one that was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

LONGEST = 100  # characters of a value in a message


@dataclass(frozen=True)
class Accepted:
    """The accepted values of a key.

    Attributes:
        text: what a message says of them.
        allows: whether a value is one of them.
    """

    text: str
    allows: Callable[[Any], bool]

    def __or__(self, other: Accepted) -> Accepted:
        return Accepted(f"{self.text}, {other.text}", lambda value: self.allows(value) or other.allows(value))


def only(*values: Any) -> Accepted:
    """Accept these values alone; True is not 1."""
    text = ", ".join("null" if value is None else str(value) for value in values)
    return Accepted(text, lambda value: any(_equal(value, accepted) for accepted in values))


def _equal(value: Any, accepted: Any) -> bool:
    return isinstance(value, bool) == isinstance(accepted, bool) and value == accepted


NULL = only(None)
UNUSED = only(None, False, [], {})
"""A feature that is absent or switched off."""
FLAG = only(True, False)
INTEGER = Accepted("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))
NUMBER = Accepted("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
NOT_NEGATIVE = Accepted("a number of at least 0", lambda value: NUMBER.allows(value) and 0 <= value < math.inf)
TEXT = Accepted("a text", lambda value: isinstance(value, str))
TEXTS = Accepted(
    "a list of texts", lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value)
)
OBJECT = Accepted("an object", lambda value: isinstance(value, Mapping))
NO_EFFECT = Accepted("any value", lambda value: True)
"""A key that does not change what a model computes: how the checkpoint was made, or how a program runs it."""


def without_effect(*names: str) -> dict[str, Accepted]:
    """Return the entries of keys that may have any value."""
    return dict.fromkeys(names, NO_EFFECT)


def check_keys(values: Any, keys: Mapping[str, Accepted], place: str = "") -> None:
    """Check the keys and values of an object of a config.

    Args:
        values: the object.
        keys: accepted values by key. A key may be absent.
        place: the name of the object, with a dot at its end; empty for the config itself.

    Raises:
        ValueError: for another key or value, with the place and what is accepted.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{place.removesuffix('.') or 'it'} is {_shown(values)}, but it must be an object")
    for key, value in values.items():
        accepted = keys.get(key)
        if accepted is None:
            raise ValueError(f"{place}{_shown(key, quoted=False)} = {_shown(value)} is not known; {_listed(keys)}")
        if not accepted.allows(value):
            raise ValueError(f"{place}{key} = {_shown(value)} is not read; accepted: {accepted.text}")


def _listed(keys: Collection[str]) -> str:
    return f"known keys: {', '.join(keys)}"


def _shown(value: Any, quoted: bool = True) -> str:
    return (repr(value) if quoted else str(value))[:LONGEST]
