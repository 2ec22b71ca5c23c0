"""The manifest of a run: which blocks are finished, so that a killed run goes on at the next one."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.errors import OutputError
from compress.formats.base import CacheScheme
from compress.formats.containers.files import write_json

WORK = ".compress"
OWN_FILES = (
    "*.safetensors",
    "*.json",
    "*.part",
    "chat_template.jinja",
    "recipe.yaml",
    "report.md",
    "report.html",
    "training.svg",
)
"""What a run writes into its folder, and --overwrite therefore removes."""


@dataclass
class ShardEntry:
    """One finished shard: what it holds, what was done, and how it can be recognized.

    digests: sha256 of the codes per layer. schemes: how each layer is stored. results, journal: lines for the report.
    caches: attentions whose keys and values are rounded: {scheme, sha256}.
    """

    file: str
    sha256: str
    names: list[str]
    size_bytes: int
    digests: dict[str, str] = field(default_factory=dict)
    schemes: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Manifest:
    """What an output folder holds; written atomically after every shard.

    fingerprint: a digest of all that the bytes depend on. complete: the checkpoint is whole. training: what the report
    says of passes that trained.
    """

    folder: Path
    fingerprint: str
    shards: dict[str, ShardEntry] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the manifest is."""
        return self.folder / WORK / "manifest.json"

    @property
    def caches(self) -> dict[str, CacheScheme]:
        """How keys and values are rounded, by attention, those that are."""
        record = {name: record for entry in self.shards.values() for name, record in entry.caches.items()}
        return {name: CacheScheme.from_json(values["scheme"]) for name, values in record.items()}

    def write(self) -> None:
        """Write atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        values = asdict(self) | {"folder": "."}
        write_json(self.path, values)


def fingerprint(**parts: Any) -> str:
    """A digest of named values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def open_folder(folder: Path, wanted: str, overwrite: bool) -> Manifest:
    """The manifest of an output folder: a new one, or that of an earlier start of the same run.

    Raises OutputError when the folder cannot be made, holds files that are no run, or, unless `overwrite` is set,
    another run; only the files of a run are ever removed.
    """
    path = folder / WORK / "manifest.json"
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        nothing = all(child.name == WORK for child in folder.iterdir())  # empty, or nothing was finished
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made or read ({error.strerror}); name another folder") from error
    found = _read(path, folder) if path.exists() else None
    if found is not None and found.fingerprint == wanted:
        return found
    if nothing and found is None:
        return Manifest(folder, wanted)
    if not path.exists():
        raise OutputError(f"{folder}: holds files that are no run of compress; name a new or empty folder")
    if not overwrite:
        raise OutputError(
            f"{folder}: holds another run (its recipe, model, calibration text or version differs); "
            "name a new folder, or pass --overwrite to replace it"
        )
    for pattern in OWN_FILES:
        for file in folder.glob(pattern):
            file.unlink()
    shutil.rmtree(folder / WORK)
    return Manifest(folder, wanted)


def _read(path: Path, folder: Path) -> Manifest | None:
    try:
        values = json.loads(path.read_text())
        shards = {name: ShardEntry(**entry) for name, entry in values.pop("shards").items()}
        return Manifest(**{**values, "folder": folder, "shards": shards})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # written by another version, or damaged; it is not this run
