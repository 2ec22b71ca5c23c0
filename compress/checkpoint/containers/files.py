"""Atomic writing of files, and their digests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from compress.errors import SaveError

FULL = errno.ENOSPC, errno.EFBIG, errno.EDQUOT
UNWRITABLE = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM)
"""The errors of a full disk, and of a place that cannot be written."""
RESUMES = "finished blocks are kept, and the same command resumes after them"


@contextmanager
def told_of_writing(folder: Path) -> Iterator[None]:
    """Raise SaveError, which says how to resume, where another library cannot write. folder: if it names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise SaveError(f"{error.filename or folder}: {reason_of(error)}; {RESUMES}") from error


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on success it replaces `path`, on an error it is removed.

    The file has the permissions of any new file of the user: libraries that write it by a temporary file of their own
    would let nobody else read it.

    Raises:
        SaveError: if the disk is full or the folder cannot be written; it says how to resume.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)
        part.touch()
        permissions = part.stat().st_mode
        yield part
        part.chmod(permissions)
        with part.open("r+b") as file:  # Windows flushes only files that are open for writing
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):  # a folder that became read-only keeps it
            part.unlink(missing_ok=True)
        raise SaveError(f"{path}: {reason_of(error)}; {RESUMES}") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def reason_of(error: Exception) -> str:
    """The reason why a file could not be written."""
    text = str(error)
    if getattr(error, "errno", None) in FULL or any(os.strerror(number) in text for number in FULL):
        return "the disk is full"
    return f"cannot be written ({text})"


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def file_sha256(path: Path) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, with its links followed, is inside of a folder.

    The hub's cache stores the files of `snapshots/REVISION` as links to the folder `blobs` next to `snapshots`; these
    links count as inside.
    """
    real, root = path.resolve(), folder.resolve()
    blobs = root.parent.parent / "blobs"
    return real.is_relative_to(root) or (root.parent.name == "snapshots" and real.parent == blobs)


def tensor_file_bytes(folder: Path) -> int:
    """Bytes of the files in a folder that hold tensors."""
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.gguf") for path in folder.glob(pattern))
