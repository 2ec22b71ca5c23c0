"""Results on disk: a killed evaluation continues, and the base model is measured once for many variants."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from compress.passes.contract.journal import Journal
from compress.passes.contract.processes import ALONE, Processes

T = TypeVar("T")

BASE_MODELS = "compress/base-models"
"""The folder of the results of base models, in the user's cache of models."""
LARGEST_CACHE = (
    4_000_000_000  # bytes of results of base models; above it, those that are unused for longest are deleted
)
LOCK = "lock"
"""The file in the folder of a base model that a run locks while it measures the model."""
DAY = 86400.0  # seconds in which results that were used are not deleted: another process may be reading them


@dataclass(frozen=True)
class Store:
    """A folder for the results of one model.

    Attributes:
        folder: None stores results in memory.
        model: Digest of the measured model.
        base: Digest of the base model, which the results depend on.
        processes: Of the launcher; each process writes its own file.
        shared: Folder for the results of the base model, which several runs share; None: in `folder`.
    """

    folder: Path | None = None
    model: str = ""
    base: str = ""
    processes: Processes = ALONE
    shared: Path | None = None

    def of_base(self) -> Store:
        """Return the store of the base model."""
        return replace(self, folder=self.shared or self.folder, model=self.base)

    def has_base_results(self) -> bool:
        """Return whether an earlier run has stored results of the base model."""
        return self.shared is not None and any((self.shared / self.base[:16]).glob("*/*.jsonl"))

    @contextmanager
    def base_locked(self, journal: Journal) -> Iterator[None]:
        """Lock the shared results of the base model, so that runs at the same time measure it once.

        The system releases the lock when the process ends. Of several processes of a launcher, rank 0 locks. A file
        system without locks is noted in the journal.
        """
        if self.shared is None or not self.processes.first:
            yield
            return
        lock = FileLock(self.shared / self.base[:16] / LOCK)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                journal.add("progress", "evaluate", "waiting for another run, which measures the base model")
                lock.acquire()
        except (OSError, NotImplementedError) as error:
            reason = "no locks" if isinstance(error, NotImplementedError) else f"no locks ({error.strerror})"
            journal.add(
                "note", "evaluate", f"{self.shared}: {reason}; runs at the same time measure the base model each"
            )
        try:
            yield
        finally:
            lock.release()

    def results(self, kind: str) -> Results:
        """Open the results of one kind of measurement of this model."""
        place = None if self.folder is None else self.folder / self.model[:16] / kind
        return Results(place, self.processes)

    def base_folder(self, name: str) -> Path | None:
        """Return a folder for what all variants need of the base model."""
        folder = self.of_base().folder
        return None if folder is None else folder / self.base[:16] / name


class Results:
    """JSON values by key, appended to a file as they are computed.

    A line that was cut off by a kill is left out, and its value is computed again.
    """

    def __init__(self, folder: Path | None, processes: Processes = ALONE) -> None:
        self._processes = processes
        self._values: dict[str, Any] = {}
        self._file: Path | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob("*.jsonl")):
                self._values.update(_lines(path))
            self._file = folder / f"{processes.rank}.jsonl"
            _end_line(self._file)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def put(self, values: Iterable[tuple[str, Any]]) -> None:
        """Store values, and append them to the file."""
        new_values = dict(values)
        self._values |= new_values
        if self._file is not None and new_values:
            lines = "".join(json.dumps([key, value]) + "\n" for key, value in new_values.items())
            with self._file.open("ab", buffering=0) as file:  # in one write: another run may append to this file
                file.write(lines.encode())

    def fill(self, items: Sequence[T], key: Callable[[T], str], compute: Callable[[list[T]], None]) -> list[Any]:
        """Return the values of items; each process computes a share of the missing ones.

        Args:
            items: Items in the order of the result.
            key: Returns the key of an item.
            compute: Computes some items, and stores their values by `put`.
        """
        item_by_key = {key(item): item for item in items}
        own_keys = self._processes.share(list(item_by_key))  # of all keys: processes may know different ones
        missing = [item_by_key[name] for name in own_keys if name not in self._values]
        if missing:
            compute(missing)
        for part in self._processes.gather({name: self._values[name] for name in own_keys}):
            self._values |= part
        assert all(name in self._values for name in item_by_key)
        return [self._values[key(item)] for item in items]


def digest_of(*parts: Any) -> str:
    """Compute a digest of plain values, for keys and names of folders."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def shared_results(base: str) -> Path | None:
    """Return the folder in the user's cache for the results of base models; None if it cannot be written.

    Args:
        base: Digest of the base model that is used now.
    """
    from huggingface_hub.constants import HF_HOME

    folder = Path(HF_HOME) / BASE_MODELS
    try:
        (folder / base[:16]).mkdir(parents=True, exist_ok=True)
        os.utime(folder / base[:16])
        delete_unused(folder, LARGEST_CACHE)
    except OSError:
        return None
    return folder


def delete_unused(folder: Path, largest: int) -> None:
    """Delete the results of the models that are unused for longest, until at most `largest` bytes are left.

    Results that were used in the last `DAY` stay.

    Raises:
        OSError: if the folder cannot be read or changed.
    """
    models = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    sizes = [sum(path.stat().st_size for path in model.rglob("*") if path.is_file()) for model in models]
    excess = sum(sizes) - largest
    for model, size in zip(models, sizes, strict=True):
        if excess <= 0 or time.time() - model.stat().st_mtime < DAY:
            return
        removed = model.with_name(f"{model.name}.removed")  # at once: results point to files beside them
        model.rename(removed)
        shutil.rmtree(removed)
        excess -= size


def _lines(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            key, value = json.loads(line)
        except ValueError:
            continue
        values[key] = value
    return values


def _end_line(path: Path) -> None:
    """Close a line that a kill cut off, so that the next one begins a new line."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
