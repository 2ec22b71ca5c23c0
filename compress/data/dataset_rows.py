"""Rows of data sets by the library `datasets`: from the hub, a local folder, or a local file."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
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
    """Yield the first `max_documents` rows of a data set's split; a stream gives calibration rows `in_turns`.

    A folder may be one that `save_to_disk` wrote, or hold files of any form that the library reads. Raises
    CalibrationError: no such data set, configuration, split or revision, an unreachable hub.

    Args:
        source: The data set.
        part: Calibration or test.
        seed: Of the choice of files, for the calibration part of a stream.
    """
    path = local_path(source)
    check_local(source, part)
    place = "could not be loaded from the hub" if path is None else "could not be read"
    with told_of(part, source.label, place):
        data_set = _rows(source, part, path)
        rows = in_turns(data_set, seed) if source.streaming and part == "calibration" else iter(data_set)
    for _ in count() if source.max_documents is None else range(source.max_documents):
        with told_of(part, source.label, place):  # not around `yield`: the errors of who reads the rows are their own
            row = next(rows, END)
        if row is END:
            return
        yield row


def in_turns(rows: Any, seed: int) -> Iterator[Any]:
    """Yield all rows of a data set in turns from `AT_ONCE` of its files; the seed chooses the order of the files.

    A file is opened when its first row is read. Rows of one file stay in their order. Rows of a data set that can be
    read in any order are shuffled.
    """
    if hasattr(rows, "select"):
        yield from rows.shuffle(seed=seed)
        return
    files_count = getattr(rows, "num_shards", 1)
    if files_count == 1:
        yield from rows
        return
    order = list(range(files_count))
    random.Random(seed).shuffle(order)
    files = (iter(rows.shard(num_shards=files_count, index=index)) for index in order)
    reading = deque(islice(files, AT_ONCE))
    while reading:
        row = next(reading[0], END)
        if row is END:
            reading.popleft()
            reading.extend(islice(files, 1))
        else:
            reading.rotate(-1)
            yield row


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
