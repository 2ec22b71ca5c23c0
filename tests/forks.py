"""Python processes that start with what a run imports: forks of a server process, a tenth of the time of new ones."""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""What libraries read while they are imported."""
IMPORTED = (
    "compress.pipeline.run",
    "compress.cli.commands",
    "accelerate",
    "datasets",
    "torch.distributed.fsdp",
    "torch.optim",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
    "transformers.models.bert.modeling_bert",
    "transformers.models.mixtral.modeling_mixtral",
    "lm_eval.evaluator",
)


class Forked:
    """One process, with the methods of `subprocess.Popen` that tests call. command: as of `python`."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]):
        self._texts = tempfile.TemporaryDirectory()
        self._files = [Path(self._texts.name) / name for name in ("out", "errors")]
        for file in self._files:
            file.touch()
        files = [str(file) for file in self._files]
        self._process = _server().Process(target=_run, args=([*map(str, command)], dict(variables), files))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Of an ended process; minus the number of the signal that killed it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end. Raises TimeoutError."""
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"process {self.pid} runs on after {timeout} seconds")
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; what it wrote to the standard output and to standard error."""
        self.wait(timeout)
        out, errors = (file.read_text() for file in self._files)
        return out, errors

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


def _run(command: list[str], variables: dict[str, str], files: list[str]) -> None:
    os.environ.update(variables)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    first, *rest = command
    with ExitStack() as at_exit:  # a process of multiprocessing ends without the functions of atexit
        atexit.register = at_exit.callback
        if first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = command
            runpy.run_path(first, run_name="__main__")


@cache
def _server() -> Any:
    """The context of multiprocessing, with a server that has imported this module."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    before, context = dict(os.environ), get_context("forkserver")
    context.set_forkserver_preload([__name__])
    os.environ |= {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), SERVER: "1"}
    from multiprocessing import forkserver  # not on Windows

    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return context


SERVER = "COMPRESS_TEST_FORKS"
if SERVER in os.environ:  # this is the server, before it forks
    for _name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(_name)
