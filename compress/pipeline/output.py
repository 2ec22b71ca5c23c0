"""The output folder of a run: check it before anything is written, and add and remove the files of runs.

The manifest of a run lists each file that the run writes, with its size, before the file appears in the folder. Files
are removed by this list alone. A file of another size, a link, or a file in a linked folder belongs to the user.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from compress.checkpoint.containers.digests import MANIFEST, SUMS, WORK
from compress.checkpoint.containers.files import check_output_folder, tensor_file_bytes, write_text
from compress.checkpoint.containers.safetensors import INDEX
from compress.checkpoint.sources.untrusted import read_json
from compress.errors import OutputError
from compress.recipe.tables import megabytes

STAGED = "new"
"""The folder inside of `WORK` with files that are being written."""
WRITES = (
    "model-*-of-*.safetensors",
    "model.gguf",
    INDEX,
    "config.json",
    SUMS,
    "recipe.yaml",
    "README.md",
    "report.json",
    "report.md",
    "report.html",
    "training.svg",
)
"""Patterns of files that a run writes whatever its model is: files of the user with such names would be in its way."""
MOST = 5  # names in a message

UNRELATED = frozenset({WORK, "evaluation"})
"""What an empty output folder may hold: the state of a run, and the results that `compress eval` stores below `out`."""


def check_folder(folder: Path) -> None:
    """Raise OutputError unless a run can use the folder: it is missing, empty, or of a run. It stays as it is."""
    try:
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"{folder}: is a file; choose another folder")
        if (folder / WORK).is_symlink():
            raise OutputError(f"{folder}: {WORK} is a link, not a folder of compress; choose another folder")
        names = [child.name for child in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created or read ({error.strerror}); choose another folder") from error
    if set(names) - UNRELATED and not (folder / WORK / MANIFEST).exists():
        raise OutputError(
            f"{folder}: is not empty and was not written by compress; choose another folder, or empty the folder first"
        )
    check_output_folder(folder)


def check_space(folder: Path, needed: int) -> None:
    """Raise OutputError when the disk is too small for checkpoints of `needed` bytes; files that exist count."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    existing_bytes = sum(map(tensor_file_bytes, (folder, *(path for path in folder.glob("*") if path.is_dir()))))
    free = shutil.disk_usage(place).free + existing_bytes
    if free < needed:
        raise OutputError(
            f"{folder}: the checkpoint takes {megabytes(needed)} MB, but the disk has {megabytes(free)} MB free; "
            "choose another folder, or free disk space"
        )


def check_inner_folders(folder: Path, names: Iterable[str], files: Mapping[str, int]) -> None:
    """Raise OutputError for a folder inside of the output folder that holds files of the user, or that is no folder.

    Args:
        folder: the output folder.
        names: names of the folders inside.
        files: the files that the run has written, by name.
    """
    for name in names:
        path = folder / name
        inner = [child.relative_to(folder).as_posix() for child in path.rglob("*") if not child.is_dir()]
        theirs = sorted(set(inner) - set(files)) if path.is_dir() else [name] if os.path.lexists(path) else []
        if theirs or path.is_symlink():
            raise OutputError(
                f"{folder}: the checkpoint in format {name} is written to {path}, which holds "
                f"{spelled(theirs or [name])} that the run did not write; move it, or choose another folder"
            )


def check_files(files: Any, folder: Path) -> dict[str, int]:
    """The sizes of files by name, as a manifest lists them. Raises OutputError for other values.

    A name is a relative path inside of the output folder, with / between its parts, outside of `WORK`.
    """
    for name, size in files.items() if isinstance(files, dict) else [(files, None)]:
        inside = isinstance(name, str) and not PureWindowsPath(name).anchor and "\\" not in name and "\0" not in name
        parts = PurePosixPath(name).parts if inside else ()
        if type(size) is not int or not parts or ".." in parts or parts[0] == WORK or "/".join(parts) != name:
            raise OutputError(
                f"{folder}: {WORK}/{MANIFEST} lists {name!r}, which is no file of a run; choose another folder, or "
                "remove the folder"
            )
    return files


def listed_files(folder: Path) -> dict[str, int]:
    """Return the files that the manifest in a folder lists, also one of another version. Raises OutputError."""
    try:
        files = read_json(folder / WORK / MANIFEST)["files"]
    except (ValueError, KeyError) as error:
        raise OutputError(
            f"{folder}: {WORK}/{MANIFEST} does not list the files of its run (it is damaged, or of an earlier "
            "version), so they look like yours; remove the folder yourself, or choose another folder"
        ) from error
    return check_files(files, folder)


def record_rewritten(folder: Path, names: Iterable[str]) -> None:
    """Update the sizes of files of a finished run that were written again, if its manifest lists files."""
    path = folder / WORK / MANIFEST
    try:
        files = listed_files(folder)
    except OutputError:  # the folder of another program, or of a version that listed none
        return
    sizes = {name: (folder / name).stat().st_size for name in names if name in files}
    write_text(path, json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"files": files | sizes}) + "\n")


def remove_files(folder: Path, files: Mapping[str, int]) -> None:
    """Remove the files that an earlier run wrote, and its folders that are empty then.

    files: their sizes by name, from `listed_files`.

    Raises OutputError, and removes nothing, if the user has changed one of the files, or has put a file in the place of
    one that a new run writes (`WRITES`).
    """
    present = {name: size for name, size in files.items() if os.path.lexists(folder / name)}
    temporary = {path for pattern in WRITES for path in folder.glob(pattern)}
    changed = [name for name, size in present.items() if not _as_written(folder, name, size)]
    changed += [name for path in temporary if (name := path.relative_to(folder).as_posix()) not in present]
    if changed:
        raise OutputError(
            f"{folder}: the earlier run did not write {spelled(changed)} as it is now; move it, or use another folder"
        )
    for name in present:
        (folder / name).unlink()
    inner = {parent for name in present for parent in PurePosixPath(name).parents}
    for parent in sorted(inner - {PurePosixPath(".")}, key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):  # it holds files of the user
            (folder / parent).rmdir()


def staging_folder(folder: Path) -> Path:
    """The folder for files that are being written; it is created."""
    place = folder / WORK / STAGED
    place.mkdir(parents=True, exist_ok=True)
    return place


def staged_sizes(folder: Path, files: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the staged files by name. files: those that the run has listed before.

    Raises OutputError if a name is that of a file of the user.
    """
    place = staging_folder(folder)
    sizes = {path.relative_to(place).as_posix(): path.stat().st_size for path in place.rglob("*") if path.is_file()}
    conflicts = [
        name for name in sizes if (name not in files or _linked(folder, name)) and os.path.lexists(folder / name)
    ]
    if conflicts:
        raise OutputError(
            f"{folder}: holds {spelled(conflicts)}, which the run did not write; move it, and run the "
            "same command again"
        )
    return sizes


def move_staged(folder: Path, names: Iterable[str]) -> None:
    """Move staged files into the output folder, and remove the staging folder."""
    place = staging_folder(folder)
    for name in sorted(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(place / name, folder / name)
    shutil.rmtree(place)


def spelled(names: Iterable[str]) -> str:
    """Return the first names of a list, for a message."""
    ordered = sorted(names)
    return ", ".join(ordered[:MOST]) + (f" and {len(ordered) - MOST} more" if len(ordered) > MOST else "")


def _as_written(folder: Path, name: str, size: int) -> bool:
    """Whether a file is a regular one of the given size, in folders that are no links."""
    path = folder / name
    return not _linked(folder, name) and path.is_file() and path.stat().st_size == size


def _linked(folder: Path, name: str) -> bool:
    """Whether a file, or a folder between it and the output folder, is a link."""
    return any((folder / part).is_symlink() for part in (PurePosixPath(name), *PurePosixPath(name).parents[:-1]))
