"""The options of a pass: error messages in terms of the recipe, and overrides for some layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails
from typing_extensions import Self

from compress.errors import RecipeError, TargetError, UserError, did_you_mean
from compress.models.structure.patterns import matches, select
from compress.numerics.dtype_names import DTYPE_BITS, dtype_hint
from compress.passes.contract.discovery import is_class
from compress.passes.contract.problems import Problems, for_all, mistakes_in, together
from compress.passes.contract.wording import Place, place_text, unknown_option

PLAIN_WORDS = {
    "missing": "is missing",
    "too_short": "must not be empty",
    "model_type": "must be a mapping of options",
    "tuple_type": "must be a list",
}
"""Replacements of pydantic messages, by type, whose wording is about Python instead of YAML."""

OF_THE_WHOLE = frozenset({"targets", "ignore", "true_sequential", "overrides", "allocate"})
"""Options that a pass cannot override per layer; a pass with more of them lists all in `of_the_whole`."""

INHERITED = "inherited"
"""The context of a validation of options that a layer has from the whole pass; some may have no effect there."""

DENSE = "none"
"""The value of `weights` in an override for layers that the pass skips."""


MODEL_SOURCE = object()
"""The mark of an option that names a model."""

ModelSource = Annotated[str, MODEL_SOURCE]
"""The type of an option that names a model: a hub id, a folder or a .gguf file, relative to the recipe's folder."""


class OptionError(RecipeError, ValueError):
    """A mistake in the options of a pass or of another part of a recipe.

    It is a ValueError too, so that pydantic reports it with the errors of the validation that it is part of.

    Attributes:
        place: the place inside the options.
        message: without the place.
        owner: the part of the recipe that has the options.
    """

    def __init__(self, place: Place, message: str, owner: str = "") -> None:
        super().__init__(f"{place_text((owner, *place) if owner else place)}: {message}", place)
        self.place, self.message = place, message


class Options(BaseModel):
    """A frozen part of a recipe. Its constructor raises OptionError in one line, the error that YAML gives too.

    Several mistakes are raised together, as SeveralErrors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def key(cls) -> str:
        """Return the name in recipes and errors.

        It is the module's file name if the class is called like the file, or else the class name in lower case.
        """
        file, title = cls.__module__.rpartition(".")[2], cls.__name__.lower()
        return file if file.replace("_", "") == title else title

    def without_effect(self) -> dict[str, str]:
        """The options that change nothing, given the values of the others, and the end of their error (why, a remedy).

        It is an error to set one of them to another value than its default.
        """
        return {}

    @model_validator(mode="after")
    def _check_effects(self, info: ValidationInfo) -> Self:
        if info.context == INHERITED:
            return self
        for name, reason in self.without_effect().items():
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} has no effect {reason}")
        return self

    if not TYPE_CHECKING:  # type checkers derive the constructor from the fields

        def __init__(self, /, **options: Any) -> None:
            __tracebackhide__ = True
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise option_error(error, type(self), owner=type(self).key()) from None

        __init__.__pydantic_base_init__ = True  # pydantic then validates mappings without calling it


def option_error(error: ValidationError, model: type[BaseModel], place: Place = (), owner: str = "") -> UserError:
    """Return the mistakes that pydantic found as OptionError, or as SeveralErrors.

    Args:
        model: class of the options.
        place: place of the options in those of the owner.
        owner: part of the recipe that has the options.
    """
    return together([OptionError((*place, *inner), message, owner) for inner, message in mistakes(error, model)])


def mistakes(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[Place, str]]:
    """Yield the mistakes that pydantic found: their places, and the messages in terms of the recipe.

    Of a value that is none of several alternatives, only the mistake of the first alternative is one.
    """
    unions: set[Place] = set()
    places = [detail["loc"] for detail in error.errors()]
    for detail in error.errors():
        if detail["type"] == "too_short" and any(detail["loc"] == place[:-1] for place in places):
            continue  # without the wrong items
        union = _union_in(model, detail["loc"])
        if union is not None:
            if union in unions:
                continue
            unions.add(union)
            detail["loc"] = union
        inner = detail.get("ctx", {}).get("error")
        if isinstance(inner, UserError):
            for option in mistakes_in(inner):
                assert isinstance(option, OptionError)
                yield (*detail["loc"], *option.place), option.message
        else:
            yield _in_words(detail, model)


def _in_words(detail: ErrorDetails, model: type[BaseModel]) -> tuple[Place, str]:
    """Return the place and the message of one mistake."""
    place: Place = detail["loc"]
    if detail["type"] == "extra_forbidden":
        owner = _owner(model, place[:-1])
        names = [field.alias or name for name, field in owner.model_fields.items()]
        return place, unknown_option(str(place[-1]), names, detail["input"])
    if detail["type"] in PLAIN_WORDS:
        return place, PLAIN_WORDS[detail["type"]]
    message = detail["msg"].removeprefix("Value error, ")
    got = "" if detail["type"] == "value_error" else f", not {detail['input']!r}"
    return place, message[0].lower() + message[1:] + got + _meant(place, detail["input"])


def _meant(place: Place, value: Any) -> str:
    """Return what a value of another program's form is probably meant for, at the end of a message."""
    if place[-1:] == ("dtype",) and isinstance(value, str) and value not in DTYPE_BITS:
        return dtype_hint(value)
    return ""


def _owner(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    for part in path:
        inner = model.model_fields[str(part)].annotation
        for kind in (inner, *get_args(inner)):  # `Evaluate | None` has Evaluate among its arguments
            if is_class(kind) and issubclass(kind, BaseModel):
                model = kind
    return model


def _union_in(model: type[BaseModel], place: Place) -> Place | None:
    """Return the place of the field with several alternatives that contains a place, or None."""
    for depth, part in enumerate(place):
        field = model.model_fields.get(str(part))
        if field is None:
            return None
        alternatives = [kind for kind in get_args(field.annotation) if kind is not type(None)]
        if get_origin(field.annotation) in (Union, UnionType) and len(alternatives) > 1:
            return place[: depth + 1]
        model = next((k for k in (field.annotation, *alternatives) if is_class(k) and issubclass(k, BaseModel)), model)
    return None


def patterns(value: Any) -> Any:
    """Accept one pattern without a list; check that regular expressions compile."""
    items = (value,) if isinstance(value, str) else value
    for pattern in items if isinstance(items, (list, tuple)) else ():
        if isinstance(pattern, str) and pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return items


class SomeBlocks(Options):
    """A choice of blocks by their place in the model.

    Attributes:
        ends: the fraction of the blocks at either end that are chosen.
        first: the fraction of the blocks at the beginning that are chosen, at least one block; 0: none.
        every: of the blocks between, every which one is chosen; None: none of them.
    """

    ends: float = Field(default=0, ge=0, le=0.5)
    first: float = Field(default=0, ge=0, le=1)
    every: int | None = Field(default=None, gt=0)

    def takes(self, index: int, count: int) -> bool:
        """Return whether block `index` of `count` is chosen."""
        start, end = int(count * self.ends), int(count * (1 - self.ends))
        if self.first > 0:
            start = max(start, int(count * self.first), 1)
        inner = self.every is not None and (index - start) % self.every == self.every - 1
        return index < start or index >= end or inner


class Override(BaseModel):
    """Options for the layers that match `targets`, in some blocks; all other options are those of the pass."""

    model_config = ConfigDict(frozen=True, extra="allow")

    targets: tuple[str, ...] = Field(min_length=1)
    blocks: SomeBlocks | None = None

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
        """Return whether the override matches a layer."""
        return any(matches(name, pattern) for pattern in self.targets)


def read_overrides(
    kind: type[BaseModel], base: Mapping[str, Any], spelled: Any, location: Place = ("overrides",)
) -> tuple[Override, ...]:
    """Read overrides: a list of {targets, options...}, or a mapping of patterns to options.

    The options of every layer are validated together.

    Args:
        kind: the class of the pass.
        base: the options of the pass.
        location: the place of the overrides in the options.

    Raises:
        OptionError: for options that the pass does not have.
    """
    if isinstance(spelled, Mapping):
        items = [((*location, key), {"targets": key}, options) for key, options in spelled.items()]
    elif isinstance(spelled, Sequence) and not isinstance(spelled, str):
        items = [((*location, i), {}, options) for i, options in enumerate(spelled)]
    else:
        raise OptionError(location, "must be a list such as [{targets: '*.down_proj', weights: int8}]")
    return tuple(for_all(lambda item: _override(kind, base, *item), items))


def _override(
    kind: type[BaseModel], base: Mapping[str, Any], place: Place, start: Mapping[str, Any], options: Any
) -> Override:
    if isinstance(options, Override):
        options = options.model_dump()
    if not isinstance(options, Mapping):
        raise OptionError(place, "must be a mapping of options, such as {weights: int8}")
    of_the_whole: frozenset[str] = getattr(kind, "of_the_whole", OF_THE_WHOLE)
    names = set(kind.model_fields) - of_the_whole
    reserved = ("blocks",) if start else ("blocks", "targets")
    changed = {name: value for name, value in options.items() if name not in reserved}
    problems = Problems()
    for name in [name for name in changed if name not in names]:
        explanation = f"applies to the whole pass and cannot be overridden{did_you_mean(name, names)}"
        message = explanation if name in of_the_whole else unknown_option(name, names, changed[name])
        problems.add(OptionError((*place, name), message))
    problems.check()
    if not changed:
        raise OptionError(place, "changes nothing; add an option, or weights: none to skip the layers")
    if changed.get("weights") == DENSE and len(changed) > 1:
        other_names = ", ".join(sorted(set(changed) - {"weights"}))
        raise OptionError(
            place, f"weights: none skips the layers, so {other_names} would have no effect; remove {other_names}"
        )
    try:
        if changed.get("weights") != DENSE:
            under = getattr(kind, "under", None)  # options of the pass that hold under this override
            own_base = base if under is None else under(base, changed)
            validated = kind.model_validate({**own_base, **changed}, context=INHERITED).model_dump()
            changed = {name: validated[name] for name in changed}
        return Override.model_validate({**start, **{k: v for k, v in options.items() if k in reserved}, **changed})
    except ValidationError as error:
        raise option_error(error, kind, place) from error


def resolve_overrides(overrides: Sequence[Override], names: Sequence[str], label: str) -> dict[str, Override]:
    """Return the override of each layer: the first one that matches it.

    Raises:
        TargetError: when a pattern matches none of the pass's layers, or only layers that earlier overrides match.
    """
    override_of: dict[str, Override] = {}
    for override in overrides:
        chosen = select(names, override.targets, (), f"{label} overrides")
        new = [name for name in chosen if name not in override_of]
        if not new:
            raise TargetError(
                f"{label} overrides: targets {', '.join(override.targets)} match only layers that earlier overrides "
                "match; put this override before them"
            )
        override_of |= dict.fromkeys(new, override)
    return override_of
