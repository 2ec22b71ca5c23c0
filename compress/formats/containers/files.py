"""Atomic writing of files, and their digests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from compress.errors import SaveError


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on success it replaces `path`, on an error it is removed.

    Raises SaveError, which says how to resume, when the disk is full or the folder cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise SaveError(
            f"{path}: {reason_of(error)}; finished blocks are kept, and the same command resumes after them"
        ) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def reason_of(error: Exception) -> str:
    """The reason why a file could not be written."""
    text = str(error)
    full = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    if getattr(error, "errno", None) in full or any(os.strerror(number) in text for number in full):
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
