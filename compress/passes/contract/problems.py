"""Collect the mistakes of a recipe, to report all at once. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from compress.errors import SeveralErrors, UserError

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


class SeveralValueErrors(SeveralErrors, ValueError):  # noqa: N818  it holds several
    """Several mistakes that are ValueErrors: pydantic reports them with those of the validation they are part of."""


def together(errors: Sequence[UserError]) -> UserError:
    """Return one error for one or several mistakes; those with equal messages are one."""
    different = list({str(error): error for error in errors}.values())
    kind = SeveralValueErrors if all(isinstance(error, ValueError) for error in different) else SeveralErrors
    return different[0] if len(different) == 1 else kind(different)


def mistakes_in(error: UserError) -> tuple[UserError, ...]:
    """Return the mistakes of an error, each as it would be raised alone."""
    return error.errors if isinstance(error, SeveralErrors) else (error,)


class Problems:
    """Mistakes of a user that are collected, to be raised together."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    def add(self, error: UserError) -> None:
        """Collect a mistake, or several."""
        self.errors += mistakes_in(error)

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function and return its result; None if it raises a mistake of the user, which is collected."""
        try:
            return function(*args, **kwargs)
        except UserError as error:
            self.add(error)
        return None

    def check(self) -> None:
        """Raise the mistake that was collected; several are raised as one error."""
        if self.errors:
            raise together(self.errors)


def for_all(function: Callable[[A], T], items: Iterable[A]) -> list[T]:
    """Return the result of a function for each item; the mistakes of all items are raised together."""
    problems, results = Problems(), []
    for item in items:
        try:
            results.append(function(item))
        except UserError as error:
            problems.add(error)
    problems.check()
    return results
