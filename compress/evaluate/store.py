"""Results on disk: a killed evaluation continues, and the base model is measured once for many variants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from compress.passes.contract.processes import ALONE, Processes

T = TypeVar("T")


@dataclass(frozen=True)
class Store:
    """A folder for the results of one model.

    Attributes:
        folder: None stores results in memory.
        model: Digest of the measured model.
        base: Digest of the base model, which the results depend on.
        processes: Of the launcher; each process writes its own file.
    """

    folder: Path | None = None
    model: str = ""
    base: str = ""
    processes: Processes = ALONE

    def results(self, kind: str) -> Results:
        """Open the results of one kind of measurement of this model."""
        place = None if self.folder is None else self.folder / self.model[:16] / kind
        return Results(place, self.processes)

    def base_folder(self, name: str) -> Path | None:
        """Return a folder for what all variants need of the base model."""
        return None if self.folder is None else self.folder / self.base[:16] / name


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
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps([key, value]) + "\n" for key, value in new_values.items()))

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
    """Close a line that a kill cut off, so that the next one is a line of its own."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
