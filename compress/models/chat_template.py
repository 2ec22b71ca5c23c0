"""Render chat templates with limits of time, memory and length, in a separate process.

A chat template is a Jinja program of the model's publisher. The sandbox of transformers keeps it from files and from
the objects of Python, but not from endless loops and texts. Neither can be stopped inside of this process.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, Any

from jinja2 import TemplateError

from compress.errors import CannotRun, ModelError, one_line
from compress.models.child_process import start_function

if TYPE_CHECKING:  # the process that renders does without them
    from transformers import BatchEncoding, PreTrainedTokenizerBase

SECONDS = 10.0
"""For one conversation, which takes about a millisecond."""
MEMORY = 1 << 30
"""Bytes that the process may take to render, where the system limits the memory of a process."""
LONGEST, LONGER = 1 << 20, 16
"""The characters of any text, and those for each character of the conversation."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Sequence[Mapping[str, Any]],
    template: str | None = None,
    **options: Any,
) -> str:
    """Return the text of a conversation, as `tokenizer.apply_chat_template(..., tokenize=False)` does.

    Args:
        tokenizer: its special tokens are variables of the template.
        conversation: messages.
        template: Jinja, or the name of one of several templates of the tokenizer; None: that of the tokenizer.
        options: variables of the template, and the options of `transformers.utils.chat_template_utils`.

    Raises:
        CannotRun: for an error of the template, and for a template that does not finish within the limits.
    """
    messages = [{key: value for key, value in message.items() if value is not None} for message in conversation]
    values = {**tokenizer.special_tokens_map, **options}
    request = {"conversations": [messages], "chat_template": tokenizer.get_chat_template(template), **values}
    answer = _renderer(os.getpid()).ask(json.dumps(request, default=lambda value: f"<{type(value).__name__}>"))
    if "error" in answer:
        raise CannotRun(TemplateError(answer["error"]))
    return answer["text"]


def prompt_inputs(tokenizer: PreTrainedTokenizerBase, prompt: str, plain: bool = False) -> BatchEncoding:
    """Return the token ids and the mask of a prompt.

    Args:
        plain: do not put the prompt into the chat template of the tokenizer.

    Raises:
        ModelError: for a chat template that cannot be rendered.
    """
    if plain or tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    return tokenizer(prompt_text(tokenizer, prompt), add_special_tokens=False, return_tensors="pt")


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Return a prompt in the chat template of a tokenizer, up to the first token of the answer.

    Raises:
        ModelError: for a chat template that cannot be rendered.
    """
    try:
        return render_chat(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
    except CannotRun as error:
        raise ModelError(
            f"model: the chat template of its tokenizer cannot be rendered ({one_line(error.cause)}); correct it, or "
            "remove it from the files of the tokenizer"
        ) from error


class _Renderer:
    """A process that renders one conversation at a time. It is killed when it takes longer than `SECONDS`."""

    def __init__(self) -> None:
        self._folder, self._lock = TemporaryDirectory(), Lock()
        self._process = start_function(serve, self._folder.name)
        atexit.register(self._end)
        self._line()  # the process is ready

    def ask(self, request: str) -> dict[str, str]:
        """Return the answer of `serve`. Raises CannotRun if there is none."""
        with self._lock:
            late = Timer(SECONDS, self._process.kill)
            late.start()
            try:
                return json.loads(self._line(request))
            finally:
                late.cancel()

    def _line(self, request: str | None = None) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if request is not None:
                _write_line(self._process.stdin, request)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return line
        _renderer.cache_clear()  # the next conversation starts another process
        reason = self._end()
        if request is None:
            raise CannotRun(RuntimeError(f"its process did not start: {reason}"))
        raise CannotRun(TimeoutError(f"it did not finish within {SECONDS:g} seconds or {MEMORY >> 30} GiB of memory"))

    def _end(self) -> str:
        """End the process; returns the last line of its errors."""
        atexit.unregister(self._end)
        self._process.kill()
        _, errors = self._process.communicate()
        self._folder.cleanup()
        return (errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]


@lru_cache(maxsize=1)
def _renderer(process: int) -> _Renderer:
    """Return the renderer of a process, by its id: a forked one does not share that of its parent."""
    return _Renderer()


def serve() -> None:
    """Answer each line of standard input, a call of `render_jinja_template`, with a line: its text or an error."""
    from transformers.utils.chat_template_utils import render_jinja_template  # this runs in the separate process

    output, sys.stdout = sys.stdout, sys.stderr
    _write_line(output, "ready")
    _limit_memory()
    for line in sys.stdin:
        try:
            texts, _ = render_jinja_template(**json.loads(line))
            most = LONGEST + LONGER * len(line)
            text = texts[0]
            answer = {"text": text} if len(text) <= most else {"error": f"its text has more than {most} characters"}
        except MemoryError:
            answer = {"error": f"it takes more than {MEMORY >> 30} GiB of memory"}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        _write_line(output, json.dumps(answer))


def _write_line(output: IO[str], line: str) -> None:
    output.write(line + "\n")
    output.flush()


def _limit_memory() -> None:
    sizes = Path("/proc/self/statm")
    if not sizes.exists():  # elsewhere the system limits none
        return
    import resource  # not on all systems

    size = int(sizes.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = size + MEMORY if hard == resource.RLIM_INFINITY else min(size + MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
