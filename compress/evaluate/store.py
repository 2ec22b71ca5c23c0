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

    folder: None keeps results in memory. model, base: digests of the measured model and of the base model, which the
    results depend on. processes: of the launcher; each process writes a file of its own.
    """

    folder: Path | None = None
    model: str = ""
    base: str = ""
    processes: Processes = ALONE

    def results(self, kind: str) -> Results:
        """The results of one kind of measurement of this model."""
        place = None if self.folder is None else self.folder / self.model[:16] / kind
        return Results(place, self.processes)

    def base_folder(self, name: str) -> Path | None:
        """A folder for what all variants need of the base model."""
        return None if self.folder is None else self.folder / self.base[:16] / name


class Results:
    """JSON values by key, appended to a file as they are computed.

    A line that was cut off by a kill is left out, and its value is computed again.
    """

    def __init__(self, folder: Path | None, processes: Processes = ALONE) -> None:
        self._processes = processes
        self._known: dict[str, Any] = {}
        self._file: Path | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob("*.jsonl")):
                self._known.update(_lines(path))
            self._file = folder / f"{processes.rank}.jsonl"
            _end_line(self._file)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def put(self, values: Iterable[tuple[str, Any]]) -> None:
        """Keep values, and write them to the file."""
        found = dict(values)
        self._known |= found
        if self._file is not None and found:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps([key, value]) + "\n" for key, value in found.items()))

    def fill(self, items: Sequence[T], key: Callable[[T], str], compute: Callable[[list[T]], None]) -> list[Any]:
        """The values of items: computed where they are unknown, each process a share of them.

        compute: puts the values of some items.
        """
        wanted = {key(item): item for item in items}
        mine = self._processes.share(list(wanted))  # of all keys: processes may know different ones
        missing = [wanted[name] for name in mine if name not in self._known]
        if missing:
            compute(missing)
        for part in self._processes.gather({name: self._known[name] for name in mine}):
            self._known |= part
        assert all(name in self._known for name in wanted)
        return [self._known[key(item)] for item in items]


def digest_of(*parts: Any) -> str:
    """A digest of plain values, for keys and names of folders."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _lines(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            key, value = json.loads(line)
        except ValueError:
            continue
        found[key] = value
    return found


def _end_line(path: Path) -> None:
    """Close a line that a kill cut off, so that the next one is a line of its own."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
