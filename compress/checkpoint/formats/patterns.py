"""Match the regular expressions of configurations in a time that the length of pattern and name limits.

Configurations of other programs name layers by regular expressions of Python. `re` tries every way to match, which
takes exponential time for some patterns. Here such a pattern maps sets of positions to sets of positions, which
answers the same question: whether there is a match. (The package `regex` has a limit of time, but expands repetitions
such as a{1000000000} in memory.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise

LONGEST = 4096  # characters of a pattern
DEEPEST = 50  # groups inside of groups
FEW = 3  # quantifiers of single characters with which `re` takes at most the cube of the length
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!]|\{\d+(?:,\d*)?\}|\{,\d+\}|.", re.DOTALL)
"""An escape, a class of characters, the begin of a group, a quantifier with numbers, or one character."""
QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}

Positions = frozenset[int]
Step = Callable[[str, Positions], Positions]
"""Maps the positions in a text at which an expression begins to those at which it may end."""


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the start of a name.

    Raises:
        ValueError: for a text that is no regular expression, or that has back references, flags or more than `LONGEST`
            characters.
    """
    if len(pattern) > LONGEST:
        raise ValueError(f"the pattern {pattern[:50]!r}... has more than {LONGEST} characters")
    try:
        return _matcher(pattern)(name)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:100]!r} is no regular expression ({error})") from error


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> Callable[[str], bool]:
    compiled, tokens = re.compile(pattern), TOKEN.findall(pattern)
    quantified = [preceding for preceding, token in pairwise(tokens) if _bounds(token) is not None]
    if len(quantified) <= FEW and ")" not in quantified:
        return lambda name: compiled.match(name) is not None
    parser = _Parser(tokens)
    step = parser.alternatives(0)
    return lambda name: bool(step(name, frozenset({0})))


def _bounds(token: str) -> tuple[int, int | None] | None:
    """Return the least and the largest number of repetitions of a quantifier; None for another token."""
    if token in QUANTIFIERS:
        return QUANTIFIERS[token]
    if len(token) < 2 or token[0] != "{":
        return None
    low, comma, high = token[1:-1].partition(",")
    return int(low or 0), int(high) if high else None if comma else int(low)


class _Parser:
    """The steps of the tokens of a pattern, which `re` has compiled."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at = tokens, 0

    def _next(self) -> str:
        """Return the next token; an empty text at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def alternatives(self, depth: int) -> Step:
        """Read alternatives up to the end of their group."""
        if depth > DEEPEST:
            raise ValueError(f"a pattern has groups in more than {DEEPEST} levels")
        choices = [self._sequence(depth)]
        while self._next() == "|":
            self._at += 1
            choices.append(self._sequence(depth))
        return lambda text, starts: frozenset().union(*(choice(text, starts) for choice in choices))

    def _sequence(self, depth: int) -> Step:
        steps = list(self._items(depth))

        def run(text: str, starts: Positions) -> Positions:
            for step in steps:
                starts = step(text, starts)
            return starts

        return run

    def _items(self, depth: int) -> Iterator[Step]:
        while (token := self._next()) not in ("", "|", ")"):
            self._at += 1
            step = self._group(token, depth) if token[0] == "(" else _single(token)
            while (bounds := _bounds(self._next())) is not None:  # a second one makes the first one lazy
                self._at += 1
                step = _repeated(step, *bounds)
                if self._next() == "?":
                    self._at += 1
            yield step

    def _group(self, token: str, depth: int) -> Step:
        if token == "(" and self._next() == "?":
            raise ValueError("a pattern has a group of a kind that is not supported; use (?:...), (?=...) or (?!...)")
        inner = self.alternatives(depth + 1)
        self._at += 1  # the closing parenthesis
        if token in ("(?=", "(?!"):
            is_positive = token == "(?="
            return lambda text, starts: frozenset(p for p in starts if bool(inner(text, frozenset({p}))) is is_positive)
        return inner


def _single(token: str) -> Step:
    """Return the step of one character, or of a condition on the position."""
    if token[0] == "\\" and token[1:].isdigit():
        raise ValueError("a pattern has a back reference, which is not supported")
    compiled = re.compile(token)
    return lambda text, starts: frozenset(
        matched.end() for p in starts if (matched := compiled.match(text, p)) is not None
    )


def _repeated(step: Step, least: int, most: int | None) -> Step:
    """Repeat a step; more than the length of the text are as many, since each further one would match nothing."""

    def run(text: str, starts: Positions) -> Positions:
        for _ in range(min(least, len(text) + 1)):
            starts = step(text, starts)
        reached = starts
        for _ in range(len(text) + 1 if most is None else min(most - least, len(text) + 1)):
            starts = step(text, starts) - reached
            if not starts:
                break
            reached |= starts
        return reached

    return run
