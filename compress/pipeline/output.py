"""Check the output folder of a run before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from compress.errors import OutputError
from compress.formats.containers.files import tensor_file_bytes

WORK = ".compress"
"""The folder inside of the output folder that holds the manifest and the files of an unfinished run."""


def check_folder(folder: Path) -> None:
    """Raise OutputError unless a run can use the folder: it is missing, empty, or of a run. Nothing is written."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; choose another --out")
    try:
        held = [child.name for child in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise OutputError(f"{folder}: cannot be read ({error.strerror}); choose another --out") from error
    if set(held) - {WORK} and not (folder / WORK / "manifest.json").exists():
        raise OutputError(
            f"{folder}: is not empty and was not written by compress; choose another --out, or empty the folder first"
        )


def check_space(folder: Path, needed: int) -> None:
    """Raise OutputError when the disk is too small for a checkpoint of `needed` bytes; shards that exist count."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    held = tensor_file_bytes(folder)
    free = shutil.disk_usage(place).free + held
    if free < needed:
        raise OutputError(
            f"{folder}: the checkpoint takes {needed / 1e9:.1f} GB, but the disk has {free / 1e9:.1f} GB free; choose "
            "another --out, or free disk space"
        )
