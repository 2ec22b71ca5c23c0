"""Rows of data sets by the library `datasets`: from the hub, a local folder, or a local file."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from os.path import expanduser, realpath
from pathlib import Path
from typing import Any

from compress.data.text_source import PYTHON, SPLITS, GivenText, Part, TextSource
from compress.errors import CalibrationError, did_you_mean

OFFLINE = "offline sources: embedded, self, or the path of a .txt, .jsonl or .npy file"
AT_ONCE = 8
"""Files of a stream that calibration reads in turns: more of them are more kinds of text, and more requests."""
END = object()
BUILDERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
"""Files that a data set may be, and the reader of each in the library."""


@contextmanager
def told_of(part: Part, label: str, place: str) -> Iterator[None]:
    """Raise every failure of the library as CalibrationError. place: where the data set comes from."""
    try:  # imported here, because they take seconds and only data sets need them
        from datasets.exceptions import DatasetsError
        from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]  its client's
    except ImportError as error:
        raise CalibrationError(
            f"{part}: source {label} needs the package datasets ({error}); pip install datasets; {OFFLINE}"
        ) from error
    try:
        yield
    except (OSError, ValueError, RuntimeError, DatasetsError, HTTPError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CalibrationError(f"{part}: source {label} {place}: {reason}; {OFFLINE}") from error


def dataset_rows(source: TextSource, part: Part, seed: int = 0) -> Iterator[Any]:
    """Yield the first `max_documents` rows of a data set's split; a stream gives calibration rows as `RowStream` does.

    A folder may be one that `save_to_disk` wrote, or hold files of any form that the library reads. Raises
    CalibrationError: no such data set, configuration, split or revision, an unreachable hub.

    Args:
        source: The data set.
        part: Calibration or test.
        seed: Of the choice of files, for the calibration part of a stream.
    """
    if source.streaming and part == "calibration":
        yield from RowStream(source, seed)
        return
    data_set = opened_data_set(source, part)
    with reported(source, part):
        rows = iter(data_set)
    for _ in count() if source.max_documents is None else range(source.max_documents):
        with reported(source, part):  # not around `yield`: the errors of who reads the rows are their own
            row = next(rows, END)
        if row is END:
            return
        yield row


def opened_data_set(source: TextSource, part: Part) -> Any:
    """Open a data set without reading its rows. Raises CalibrationError."""
    check_local(source, part)
    with reported(source, part):
        return _rows(source, part, local_path(source))


def reported(source: TextSource, part: Part) -> AbstractContextManager[None]:
    """Raise every failure of reading a data set as CalibrationError."""
    place = "could not be loaded from the hub" if local_path(source) is None else "could not be read"
    return told_of(part, source.label, place)


class RowStream:
    """The calibration rows of a stream, in turns from `AT_ONCE` of its files, from a position that can be stored.

    The seed chooses the order of the files. A file is opened when its first row is read. Rows of one file stay in their
    order. Rows of a data set that can be read in any order are shuffled, and divided as if into files. At the end,
    `begin_again` starts a new round, with the same files in another order.

    Several processes read different rows: different files, or, if there are fewer files than processes, the rows of all
    files by turns. The limit `max_documents` is that of all processes together.
    """

    def __init__(self, source: TextSource, seed: int, rank: int = 0, processes: int = 1) -> None:
        self.source, self.seed, self.rank, self.processes = source, seed, rank, processes
        data_set = opened_data_set(source, "calibration")
        if hasattr(data_set, "select"):
            parts = max(1, min(processes, len(data_set)))
            data_set = data_set.shuffle(seed=seed).to_iterable_dataset(num_shards=parts)
        self._data_set, self._files_count = data_set, data_set.num_shards
        self.round = 0
        self._begin()

    @property
    def divides_files(self) -> bool:
        """Whether the processes read different files."""
        return self._files_count >= self.processes

    def _begin(self) -> None:
        """Move to the first row of a round."""
        order = list(range(self._files_count))
        random.Random(self.seed).shuffle(order)
        self._order = order[self.rank :: self.processes] if self.divides_files else order
        if self.round:
            random.Random(self.seed + self.round).shuffle(self._order)
        self._count = self._next_file = 0
        self._reading: deque[tuple[int, Any, Iterator[Any]]] = deque()

    def begin_again(self) -> None:
        """Start the next round."""
        self.round += 1
        self._begin()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            is_of_process = self.divides_files or self._count % self.processes == self.rank
            number = self.rank + self._count * self.processes if self.divides_files else self._count
            if self.source.max_documents is not None and number >= self.source.max_documents:
                raise StopIteration
            row = self._next_of_all()
            if row is END:
                raise StopIteration
            self._count += 1
            if is_of_process:
                return row

    def _next_of_all(self) -> Any:
        """Return the next row that this process reads, or `END`."""
        while True:
            while len(self._reading) < AT_ONCE and self._next_file < len(self._order):
                self._open(self._order[self._next_file], None)
                self._next_file += 1
            if not self._reading:
                return END
            with reported(self.source, "calibration"):
                row = next(self._reading[0][2], END)
            if row is not END:
                self._reading.rotate(-1)
                return row
            self._reading.popleft()

    def _open(self, file: int, state: Any) -> None:
        """Begin to read a file, at a stored position unless it is None."""
        shard = self._data_set.shard(num_shards=self._files_count, index=file)
        if state is not None:
            shard.load_state_dict(state)
        self._reading.append((file, shard, iter(shard)))

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        reading = [[file, shard.state_dict()] for file, shard, _ in self._reading]
        return {"round": self.round, "count": self._count, "next_file": self._next_file, "reading": reading}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `state` returned for the same data set, seed and process."""
        self.round = state["round"]
        self._begin()
        self._count, self._next_file = state["count"], state["next_file"]
        for file, position in state["reading"]:
            self._open(file, position)


def local_path(source: TextSource) -> Path | None:
    """The file or folder of a data set; None for one of the hub."""
    assert source.dataset is not None
    path = Path(expanduser(source.dataset))
    return path if path.exists() or _is_a_path(source.dataset) else None


def origin(source: TextSource, part: Part) -> tuple[str, ...] | None:
    """Identify the file, or the split of a data set, that a part reads; None for texts whose parts differ."""
    if isinstance(source, GivenText):
        return PYTHON, source.data.sha256
    path = Path(str(source.source)) if source.dataset is None else local_path(source)
    if source.dataset is None and not source.is_file:
        return None
    if path is None:
        return str(source.dataset), str(source.config), str(source.revision), source.split_of(part)
    has_one_split = path.is_file() or (path / "state.json").exists()
    split = source.split or SPLITS["calibration"] if has_one_split else source.split_of(part)
    return realpath(path), str(source.config), split


def _is_a_path(name: str) -> bool:
    """Whether a name cannot be a hub id, which is NAME or OWNER/NAME."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix in BUILDERS


def check_local(source: TextSource, part: Part) -> None:
    """Raise CalibrationError for a local data set that is missing, or a file of an unknown kind."""
    path = local_path(source)
    if path is None:
        return
    if not path.exists():
        raise CalibrationError(
            f"{part}: dataset {source.dataset}: no such file or folder; write a hub id (OWNER/NAME) or an existing path"
        )
    if path.is_file() and path.suffix not in BUILDERS:
        suffixes = ", ".join(BUILDERS)
        raise CalibrationError(
            f"{part}: dataset {source.dataset} is not a data set file ({suffixes}); write it as source: "
            f"{source.dataset} if it is a .txt or .npy file"
        )


def _rows(source: TextSource, part: Part, path: Path | None) -> Iterable[Any]:
    import datasets  # takes seconds to import; only data sets need it

    split, name = source.split_of(part), str(source.dataset)
    streaming = "[" not in split  # slices (train[:10%]) need the whole split
    if path is not None and path.is_file():
        split = source.split or "train"
        files = {split.partition("[")[0]: str(path)}
        return datasets.load_dataset(BUILDERS[path.suffix], data_files=files, split=split, streaming=streaming)
    if path is not None and (path / "dataset_dict.json").exists():
        splits: Any = datasets.load_from_disk(str(path))
        return _split_of(splits, split)
    if path is not None and (path / "state.json").exists():
        return _split_of({source.split or split: datasets.load_from_disk(str(path))}, source.split or split)
    name = name if path is None else str(path)
    return datasets.load_dataset(name, source.config, split=split, revision=source.revision, streaming=streaming)


def _split_of(splits: Mapping[str, Any], split: str) -> Iterable[Any]:
    if split not in splits:
        raise ValueError(f"no split {split!r}{did_you_mean(split, splits)} (split: NAME)")
    return splits[split]
