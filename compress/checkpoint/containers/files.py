"""Atomic writing of files, and their digests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError

from compress.errors import OutputError, SaveError

FULL = errno.ENOSPC, errno.EFBIG, errno.EDQUOT
UNWRITABLE = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM)
"""The errors of a full disk, and of a place that cannot be written."""
POINTER = b"version https://git-lfs.github.com/spec/"
"""The begin of a file that Git LFS leaves in the place of a large file (git-lfs, docs/spec.md)."""
POINTED = "is a pointer of Git LFS, not the file itself; fetch the file with: git lfs pull"
RESUMES = "finished blocks are kept, and the same command resumes after them"


def user_path(path: str | Path) -> Path:
    """Return a path as users write it: with `~` for the home folder."""
    return Path(os.path.expanduser(path))


def is_pointer(path: Path) -> bool:
    """Return whether a file is a pointer of Git LFS, which a clone without it holds in the place of each large file."""
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


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


def check_writable(path: Path) -> None:
    """Check that files can be created in a folder, or in the place where a file or a folder is to be.

    Nothing remains of the trial.

    Raises:
        OutputError: if they cannot.
    """
    try:
        place = path if path.is_dir() else next(parent for parent in path.absolute().parents if parent.exists())
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place") from error


MODEL_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx")
"""Endings of files of models."""


def check_output_folder(folder: Path) -> None:
    """Check that checkpoints can be written to a folder, which may be new.

    Raises:
        OutputError: if its name is that of a file, or no file can be created in it.
    """
    if folder.suffix in MODEL_FILES and not folder.is_dir():
        raise OutputError(
            f"{folder}: a checkpoint is written to a folder, and {folder.suffix} is the ending of a file; "
            f"write the name of a folder, such as {folder.with_suffix('')}"
        )
    check_writable(folder)


def check_output_file(path: Path, suffixes: Sequence[str]) -> None:
    """Check that results can be written to a file, before the work that they are the results of.

    Args:
        path: the file.
        suffixes: the endings of the forms that can be written.

    Raises:
        OutputError: for another ending, a folder, a missing folder around the file, and one that cannot be written.
    """
    if path.is_dir():
        name = path / f"results{suffixes[0]}"
        raise OutputError(f"{path}: is a folder; write the name of a file, such as {name}")
    if path.suffix not in suffixes:
        endings = " or ".join(suffixes)
        raise OutputError(f"{path}: results are written to a file that ends in {endings}; write such a name")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}; create it first, or write another name")
    check_writable(path)


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
