"""The lock of an output folder: only one run at a time writes into it, and the end of a process releases it."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from compress.checkpoint.containers.digests import WORK
from compress.checkpoint.sources.untrusted import read_json
from compress.errors import OutputError
from compress.passes.contract.journal import Journal
from compress.pipeline.output import check_folder

LOCK = "lock"
"""The file in the work folder that a run locks; the run removes it at its end."""

HELD = errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, getattr(errno, "EDEADLOCK", errno.EDEADLK), errno.EDEADLK
"""The errors of a lock that another process holds, on POSIX and on Windows."""

PLACE = 1 << 30  # the byte that Windows locks: beyond the text, which other processes read


@contextmanager
def locked(folder: Path, journal: Journal) -> Iterator[None]:
    """Hold the lock of an output folder inside the context; the system releases it when the process ends.

    Raises OutputError, with the process that holds it, when the folder is locked or cannot be written. A file system
    without locks is noted in the journal.
    """
    check_folder(folder)
    path = folder / WORK / LOCK
    try:
        created = [place for place in (path.parent, folder) if not place.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _opened(path, folder, journal)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created or read ({error.strerror}); choose another folder") from error
    with file:
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        file.truncate(0)
        file.write(json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": started}))
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):  # Windows keeps files that are open
                if _is_at(file, path):
                    path.unlink()
            for place in created:
                with suppress(OSError):  # it holds the files of the run
                    place.rmdir()


def _opened(path: Path, folder: Path, journal: Journal) -> IO[str]:
    """The locked file. Raises OutputError when another process holds the lock, OSError."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _take(file.fileno())
        except OSError as error:
            if error.errno in HELD:
                file.close()
                wait = "wait until it ends, or choose another folder"
                raise OutputError(f"{folder}: {_holder(path)} works in this folder; {wait}") from error
            message = f"the file system has no locks ({error.strerror}); a second run would not be noticed"
            journal.add("note", "run", message)
            return file
        if _is_at(file, path):
            return file
        file.close()  # the run that held it removed it


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether the path still names the open file; where the folder was deleted, it may be that of another run."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _take(file: int) -> None:
    """Lock an open file, or raise OSError at once."""
    if os.name == "nt":
        system: Any = import_module("msvcrt")
        os.lseek(file, PLACE, os.SEEK_SET)
        system.locking(file, system.LK_NBLCK, 1)
    else:
        system = import_module("fcntl")
        system.flock(file, system.LOCK_EX | system.LOCK_NB)


def _holder(path: Path) -> str:
    """Return the process that holds a lock, in words."""
    try:
        owner = read_json(path)
        return f"process {owner['process']} on {owner['host']}, since {owner['since']},"
    except (ValueError, KeyError):
        return "another process"  # that has not written its name yet
