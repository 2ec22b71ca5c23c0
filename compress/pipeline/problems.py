"""Collect the mistakes of a recipe on a model, to report all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from compress.errors import SeveralErrors, UserError

P = ParamSpec("P")
T = TypeVar("T")


class Problems:
    """Mistakes of a user that are collected, to be raised together."""

    def __init__(self) -> None:
        self._errors: list[UserError] = []

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function and return its result; None if it raises a mistake of the user, which is collected."""
        try:
            return function(*args, **kwargs)
        except SeveralErrors as error:
            self._errors += error.errors
        except UserError as error:
            self._errors.append(error)
        return None

    def check(self) -> None:
        """Raise the mistake that was collected; several are raised as one error."""
        errors = list({str(error): error for error in self._errors}.values())
        if errors:
            raise errors[0] if len(errors) == 1 else SeveralErrors(errors)
