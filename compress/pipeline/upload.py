"""Upload a finished checkpoint to a file system that fsspec opens, such as s3://, gs:// or hf://."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from compress.checkpoint.containers.digests import SUMS, WORK
from compress.checkpoint.containers.files import file_sha256, write_text
from compress.checkpoint.containers.safetensors import INDEX
from compress.checkpoint.sources.untrusted import read_json
from compress.errors import CannotRun, OutputError, SaveError, call_foreign
from compress.pipeline.publish import finished_files

UPLOADED = "uploaded.json"
"""The file inside of `WORK` with the digests of the files that were uploaded, by url and name."""
LAST = (INDEX, "config.json", SUMS)
"""The files that are uploaded last, in this order: a place without digests holds no complete checkpoint."""


@dataclass(frozen=True)
class Destination:
    """A folder of a file system.

    Attributes:
        url: its address.
        files: the file system of fsspec.
        root: the path of the folder in it.
    """

    url: str
    files: Any
    root: str

    @classmethod
    def at(cls, url: str) -> Destination:
        """Open an address; nothing is read from it.

        Raises:
            OutputError: for an address of no file system, or of one whose package is not installed.
        """
        if not all(url.partition("://")):
            raise OutputError(f"{url}: is no address; write one such as s3://BUCKET/FOLDER")
        try:
            files, root = call_foreign(url_to_fs, url)
        except CannotRun as error:
            raise OutputError(
                f"{url}: cannot be opened ({error}); write s3://, gs://, hf:// or file://, and install its package, "
                "such as s3fs or gcsfs"
            ) from error
        return cls(url.rstrip("/"), files, root.rstrip("/"))

    def path(self, name: str) -> str:
        """Return the path of a file of the folder."""
        return f"{self.root}/{name}"

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of all files below the folder, by name; empty if there is no folder."""
        self.files.invalidate_cache()
        if not self.files.exists(self.root):
            return {}
        entries = self.files.find(self.root, detail=True)
        return {path[len(self.root) :].lstrip("/"): int(entry["size"]) for path, entry in entries.items()}

    def put(self, name: str, content: Path | bytes) -> None:
        """Write a file, or replace it."""
        self.files.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
        if isinstance(content, bytes):
            self.files.pipe_file(self.path(name), content)
        else:
            self.files.put_file(str(content), self.path(name))

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.files.rm_file(self.path(name))

    def listed(self) -> set[str]:
        """Return the names in the digests of the checkpoint in the folder."""
        lines = self.files.cat_file(self.path(SUMS)).decode(errors="replace").splitlines()
        return {line.partition("  ")[2] for line in lines}


def check_place(url: str, folder: Path, overwrite: bool = False) -> None:
    """Check that a checkpoint may be uploaded to an address; called before a run whose result is to be uploaded.

    Args:
        url: the address.
        folder: the output folder of the run.
        overwrite: whether to replace another checkpoint there.

    Raises:
        OutputError: for an address that cannot be opened, or that holds files other than uploads of `folder`.
    """
    place = Destination.at(url)
    try:
        sizes = call_foreign(place.sizes)
    except CannotRun as error:
        raise OutputError(f"{url}: cannot be read ({error}); check the address and the login") from error
    if sizes and not overwrite and not _uploaded(folder, place):
        raise OutputError(f"{url}: holds other files, such as {min(sizes)}; choose another address, or overwrite them")


def upload(folder: str | Path, url: str, overwrite: bool = False) -> str:
    """Upload the files of a finished run to a file system that fsspec opens, and return the address.

    The index, the configuration and the digests are uploaded last, so a place with SHA256SUMS holds a complete
    checkpoint. The same call continues an upload that was interrupted: files that are there are not sent again.

    Args:
        folder: Output folder of the run.
        url: Address of a folder, such as s3://BUCKET/FOLDER.
        overwrite: Whether to replace another checkpoint there; other files stay.

    Raises:
        OutputError: for a folder without a finished and verified run, and as `check_place` does.
        SaveError: if the upload fails.
    """
    folder = Path(folder)
    contents = finished_files(folder)
    check_place(url, folder, overwrite)
    place = Destination.at(url)
    try:
        _send(place, folder, contents)
    except CannotRun as error:
        raise SaveError(
            f"{url}: the upload failed ({error}); the checkpoint is kept in {folder}, and the same command continues"
        ) from error
    return place.url


def _send(place: Destination, folder: Path, contents: Mapping[str, Path | bytes]) -> None:
    """Send the files that are not at a place yet. Raises CannotRun with the error of the file system."""
    uploaded = _uploaded(folder, place)
    sizes = call_foreign(place.sizes)
    digests = {name: _digest(content) for name, content in contents.items()}
    missing = {
        name for name in contents if uploaded.get(name) != digests[name] or sizes.get(name) != _size(contents[name])
    }
    if not missing:
        return
    stale = call_foreign(place.listed) - contents.keys() if SUMS in sizes else set()
    for name in (*reversed(LAST), *sorted(stale)):  # the digests first: what follows is incomplete
        if name in sizes:
            call_foreign(place.remove, name)
            missing |= {name} & contents.keys()
    for name in _in_order(missing):
        call_foreign(place.put, name, contents[name])
        uploaded[name] = digests[name]
        _record(folder, place, uploaded)


def _in_order(names: set[str]) -> Iterator[str]:
    """Yield names in the order of their upload."""
    yield from sorted(names - set(LAST))
    yield from (name for name in LAST if name in names)


def _digest(content: Path | bytes) -> str:
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else file_sha256(content)


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _records(folder: Path) -> dict[str, dict[str, str]]:
    """Return the digests of uploaded files by url and name."""
    try:
        return read_json(folder / WORK / UPLOADED)
    except (OSError, ValueError):
        return {}


def _uploaded(folder: Path, place: Destination) -> dict[str, str]:
    return dict(_records(folder).get(place.url, {}))


def _record(folder: Path, place: Destination, uploaded: Mapping[str, str]) -> None:
    write_text(folder / WORK / UPLOADED, json.dumps(_records(folder) | {place.url: dict(uploaded)}) + "\n")
