"""Call transformers where it changes the whole process: one thread at a time, and without messages."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import ParamSpec, TypeVar

import transformers

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

BUILDING = threading.RLock()
"""Held while a model is built or loaded. accelerate and transformers replace functions of torch and of their classes
meanwhile; two threads that overlap would leave these in place, and every later model would stay on device meta."""


def one_thread_at_a_time(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function that opens or builds models hold `BUILDING`."""

    @functools.wraps(function)
    def alone(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with BUILDING:
            return function(*args, **kwargs)

    return alone


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show errors only; compressed-tensors and gguf, which transformers calls, show no progress bars either.

    Other threads that build models wait (`BUILDING`).
    """
    with BUILDING:
        level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            with redirect_stderr(io.StringIO()):
                yield
        finally:
            transformers.logging.set_verbosity(level)
            if bars:
                transformers.logging.enable_progress_bar()
