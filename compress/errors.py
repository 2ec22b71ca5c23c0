"""The errors of the package: one small tree; each error has the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LISTED = 60  # names in a message: all passes, but not the thousands of tasks


class CompressError(Exception):
    """Base of every error raised on purpose. The message says where, what, and what to write instead."""

    exit_code = 1


class UserError(CompressError):
    """A mistake in the input that the user must correct; exit code 2."""

    exit_code = 2


class SeveralErrors(UserError):  # noqa: N818  it holds several
    """Several mistakes of one recipe.

    Attributes:
        errors: the mistakes, each as it would be raised alone.
    """

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__("\n".join([f"{len(errors)} problems:", *(f"- {error}" for error in errors)]))
        self.errors = tuple(errors)


class RecipeError(UserError):
    """The recipe is not valid; the message has the line and column of the mistake if known.

    path: the place in the recipe's data, such as ('passes', 1, 'gptq', 'group_size').
    """

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


class ModelError(UserError):
    """The model cannot be opened, or its structure or its weights are not supported."""


class NotThisFormat(ModelError):  # noqa: N818  it says what a file is not
    """A file is not of the format that was tried; another reader may read it."""


class CannotRun(ModelError):  # noqa: N818  it says what code of others could not do
    """Code of another library failed on the given input.

    Attributes:
        cause: the error of the library.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {one_line(cause)}")
        self.cause = cause


class CalibrationError(UserError):
    """The calibration or evaluation text is missing, unreachable or too short."""


class TargetError(UserError):
    """A pass cannot be applied to the modules it targets."""


class OutputError(UserError):
    """The output folder cannot be used: it holds another run, or other files."""


class Failure(CompressError):  # noqa: N818  the base class; its subclasses are named errors
    """The run itself failed; exit code 1."""


class NumericError(Failure):
    """NaN or infinity appeared in activations or statistics, or a factorization failed."""


class SaveError(Failure):
    """Writing failed: disk full, no permission. Complete files are kept."""


class ShortageError(Failure):
    """The memory of the device is too small for one step of the run."""


class DeviceError(Failure):
    """The device does not compute any more."""


class ProcessError(Failure):
    """Another process of the launcher has failed or ended. told: another process prints the reason."""

    def __init__(self, message: str, told: bool = False, exit_code: int = 1) -> None:
        super().__init__(message)
        self.told, self.exit_code = told, exit_code


class Terminated(BaseException):
    """SIGTERM came, as of a launcher whose other process ended. No Exception, so that nobody keeps it as a result."""

    exit_code = 1


class VerificationError(Failure):
    """The checkpoint does not read back as it was computed."""


class QualityError(Failure):
    """The measured quality is below what `fail_if` demands; the checkpoint and its report are complete."""

    exit_code = 3


@contextmanager
def reported_as(part: str, *general: str) -> Iterator[None]:
    """Begin errors in models and texts with what the user wrote, such as `teacher`, instead of with a general part.

    Args:
        part: what the user wrote.
        general: beginnings of errors that are replaced, such as `model`.
    """
    try:
        yield
    except (ModelError, CalibrationError) as error:
        beginning, colon, message = str(error).partition(": ")
        if not colon or beginning not in general:
            raise
        raise type(error)(f"{part}: {message}") from error


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """A hint: '; did you mean X?', or '; known: A, B, C' when no option is similar, with at most `LISTED` of them."""
    options = sorted(known)
    near = difflib.get_close_matches(wrong, options, n=1, cutoff=0.6)
    more = f" and {len(options) - LISTED} more" if len(options) > LISTED else ""
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(options[:LISTED])}{more}"


def one_line(error: Exception) -> str:
    """The message of another library's error in one line of at most 200 characters; its class if it has no message."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def call_foreign(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call code that may raise anything, and convert what it raises.

    Such code is a class or a function of another library on an arbitrary configuration, or a parser on an arbitrary
    file. Nothing else of the package catches all errors of such code.

    Returns:
        The result of `function`.

    Raises:
        CannotRun: with the error of the code as its cause.
        CompressError: errors of this package pass unchanged, as do MemoryError and torch.OutOfMemoryError.
    """
    try:
        return function(*args, **kwargs)
    except (CompressError, MemoryError):
        raise
    except Exception as error:
        import torch  # takes seconds, which `compress --help` should not

        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CannotRun(error) from error
