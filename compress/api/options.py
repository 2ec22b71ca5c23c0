"""The options of a pass: error messages in terms of the recipe, and overrides for some layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from compress.errors import TargetError, did_you_mean
from compress.model.structure.select import matches, select

Place = tuple[str | int, ...]
"""A place in a recipe: ('passes', 1, 'gptq', 'group_size')."""

PLAIN_WORDS = {
    "missing": "is missing",
    "too_short": "must not be empty",
    "model_type": "must be a mapping of options",
    "tuple_type": "must be a list",
}
"""Replacements of pydantic messages, by type, whose wording is about Python instead of YAML."""

OF_THE_WHOLE = frozenset({"targets", "ignore", "true_sequential", "overrides"})
"""Options that a pass cannot override per layer; a pass with more of them lists all in `of_the_whole`."""

DENSE = "none"
"""The value of `weights` in an override for layers that the pass skips."""


class OptionError(ValueError):
    """A mistake at a place inside a pass's options, found during validation."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(f"{place_text(place)}: {message}")
        self.place, self.message = place, message


def place_text(place: Place) -> str:
    """A place in words: 'overrides[1] group_size'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f" {part}" for part in place).strip()


def mistake(error: ValidationError, model: type[BaseModel]) -> tuple[Place, str]:
    """The first mistake that pydantic found: its place, and the message in terms of the recipe."""
    first = error.errors()[0]
    place: Place = tuple(first["loc"])
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, OptionError):
        return (*place, *inner.place), inner.message
    if first["type"] == "extra_forbidden":
        owner = _owner(model, place[:-1])
        known = [field.alias or name for name, field in owner.model_fields.items()]
        return place, f"unknown option{did_you_mean(str(place[-1]), known)}"
    if first["type"] in PLAIN_WORDS:
        return place, PLAIN_WORDS[first["type"]]
    message = first["msg"].removeprefix("Value error, ")
    asked = "" if first["type"] == "value_error" else f", not {first['input']!r}"
    return place, message[0].lower() + message[1:] + asked


def _owner(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    for part in path:
        inner = model.model_fields[str(part)].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return model


def patterns(value: Any) -> Any:
    """Accept one pattern without a list; check that regular expressions compile."""
    found = (value,) if isinstance(value, str) else value
    for pattern in found if isinstance(found, (list, tuple)) else ():
        if isinstance(pattern, str) and pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return found


class Override(BaseModel):
    """Options for the layers that match `targets`; all other options are those of the pass."""

    model_config = ConfigDict(frozen=True, extra="allow")

    targets: tuple[str, ...] = Field(min_length=1)

    _patterns = field_validator("targets", mode="before")(patterns)

    @property
    def options(self) -> dict[str, Any]:
        """The overridden options."""
        return dict(self.model_extra or {})

    @property
    def dense(self) -> bool:
        """Whether the pass skips these layers."""
        return self.options.get("weights") == DENSE

    def takes(self, name: str) -> bool:
        """Whether the override matches a layer."""
        return any(matches(name, pattern) for pattern in self.targets)


def read_overrides(kind: type[BaseModel], base: Mapping[str, Any], spelled: Any) -> tuple[Override, ...]:
    """Read overrides: a list of {targets, options...}, or a mapping of patterns to options.

    kind: the pass; base: its own options. The options of every layer are validated together.

    Raises OptionError.
    """
    here: Place = ("overrides",)
    if isinstance(spelled, Mapping):
        items = [((*here, key), {"targets": key}, options) for key, options in spelled.items()]
    elif isinstance(spelled, Sequence) and not isinstance(spelled, str):
        items = [((*here, i), {}, options) for i, options in enumerate(spelled)]
    else:
        raise OptionError(here, "must be a list such as [{targets: '*.down_proj', weights: int8}]")
    return tuple(_override(kind, base, place, start, options) for place, start, options in items)


def _override(
    kind: type[BaseModel], base: Mapping[str, Any], place: Place, start: Mapping[str, Any], options: Any
) -> Override:
    if isinstance(options, Override):
        options = options.model_dump()
    if not isinstance(options, Mapping):
        raise OptionError(place, "must be a mapping of options, such as {weights: int8}")
    of_the_whole: frozenset[str] = getattr(kind, "of_the_whole", OF_THE_WHOLE)
    known = set(kind.model_fields) - of_the_whole
    changed = {name: value for name, value in options.items() if start or name != "targets"}
    for name in changed:
        if name not in known:
            reason = "applies to the whole pass and cannot be overridden" if name in of_the_whole else "unknown option"
            raise OptionError((*place, name), f"{reason}{did_you_mean(name, known)}")
    if not changed:
        raise OptionError(place, "changes nothing; add an option, or weights: none to skip the layers")
    if changed.get("weights") == DENSE and len(changed) > 1:
        others = ", ".join(sorted(set(changed) - {"weights"}))
        raise OptionError(place, f"weights: none skips the layers, so {others} would have no effect; remove {others}")
    try:
        if changed.get("weights") != DENSE:
            whole = kind.model_validate({**base, **changed}).model_dump()
            changed = {name: whole[name] for name in changed}
        return Override.model_validate({**start, **{k: v for k, v in options.items() if k == "targets"}, **changed})
    except ValidationError as error:
        inner, message = mistake(error, kind)
        raise OptionError((*place, *inner), message) from error


def resolve_overrides(overrides: Sequence[Override], names: Sequence[str], where: str) -> dict[str, Override]:
    """The override of each layer: the first one that matches it.

    Raises TargetError when a pattern matches none of the pass's layers, or only layers that earlier overrides match.
    """
    found: dict[str, Override] = {}
    for override in overrides:
        chosen = select(names, override.targets, (), f"{where} overrides")
        new = [name for name in chosen if name not in found]
        if not new:
            raise TargetError(
                f"{where} overrides: targets {', '.join(override.targets)} match only layers that earlier overrides "
                "match; put this override before them"
            )
        found |= dict.fromkeys(new, override)
    return found
