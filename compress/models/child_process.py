"""Run a function of the package in a separate Python process, whose memory the system gets back.

The process imports modules from the same places as an installed program: the standard library, site-packages, the
user's site-packages, and the entries of PYTHONPATH that are absolute. The working directory, which may hold downloaded
files with the names of modules, and empty or relative entries of PYTHONPATH are not among them. This concerns the child
process alone: `python -m compress` and `python -c` put the working directory on the path of the process that they
start, before any code of this package runs; the command `compress` does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = Path(__file__).parents[1]
"""The folder of this package."""

START = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]  # '' is the working directory
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
place, module, function, *paths = sys.argv[1:]
spec = spec_from_file_location(Path(place).name, Path(place, "__init__.py"), submodule_search_locations=[place])
package = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(package)
getattr(import_module(module), function)(*map(Path, paths))
"""
"""The program of the process. It imports this package by its place, wherever that was found."""


def run_function(function: Callable[..., None], *paths: Path) -> subprocess.CompletedProcess[str]:
    """Call a function of a module with absolute paths in a new process; returns its exit code and its output.

    The working directory of the process is a new empty folder, which is removed at its end. The system's limits of the
    process, such as those of `ulimit`, are those of this one.
    """
    with TemporaryDirectory() as folder:
        return subprocess.run(
            _command(function, *paths), capture_output=True, text=True, check=False, cwd=folder, env=_environment()
        )


def reason_of(result: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of the errors of a process, of at most 500 characters."""
    return (result.stderr.strip().splitlines() or ["it gave no reason"])[-1][:500]


def start_function(function: Callable[[], None], folder: str) -> subprocess.Popen[str]:
    """Start a process as `run_function` does, and leave it running; its input, output and errors are pipes.

    Args:
        function: of a module; it reads standard input and writes standard output.
        folder: the working directory of the process, an empty folder.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(
        _command(function), stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=_environment()
    )


def _command(function: Callable[..., None], *paths: Path) -> list[str]:
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    command = [sys.executable, *(flag for flag, on in flags.items() if on), "-c", START, str(PACKAGE)]
    return [*command, function.__module__, function.__name__, *(str(path.absolute()) for path in paths)]


def _environment() -> dict[str, str]:
    """Return the environment of this process, with the absolute entries of PYTHONPATH alone."""
    environment = dict(os.environ)
    entries = [entry for entry in environment.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    return environment | ({"PYTHONPATH": os.pathsep.join(entries)} if entries else {})
