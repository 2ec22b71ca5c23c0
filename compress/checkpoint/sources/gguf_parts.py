"""Split GGUF files: parts that each hold some of the tensors, read as one file.

The first part holds the metadata. Keys of every part state its number and the number of parts and tensors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from os.path import expanduser
from pathlib import Path
from typing import Any

from compress.checkpoint.containers.files import POINTED, file_sha256, is_pointer
from compress.checkpoint.containers.gguf_header import open_reader
from compress.checkpoint.sources.untrusted import check_folder
from compress.errors import ModelError

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The name of a part, which counts from 1 (gguf.md of the format's owners, section "Naming Convention")."""
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
"""The keys of a part; its number counts from 0."""
MOST = 5  # names in a message


def gguf_of(source: str | Path) -> Path | None:
    """Return the GGUF file that a source names, or the only one in the folder that it names; None for other models.

    Of a split file in a folder, this is the first part.

    Raises:
        ModelError: for a folder whose files cannot be listed, or that holds links to files elsewhere.
    """
    path = Path(expanduser(source))
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").exists() or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    matched = [match.group(1, 3) if (match := PART.fullmatch(file.name)) else file.name for file in files]
    if len(set(matched)) != 1:
        return None
    check_folder(path)
    return files[0]


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a split file, by the path of one; the file itself if its name is not that of a part.

    Raises:
        ModelError: for a part that is missing.
    """
    if not path.is_file():
        raise ModelError(f"model: no file {path}")
    matched = PART.fullmatch(path.name)
    if matched is None or int(matched[3]) < 2:
        return [path]
    paths = [
        path.with_name(f"{matched[1]}-{number:05d}-of-{matched[3]}.gguf") for number in range(1, int(matched[3]) + 1)
    ]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - MOST} more" if len(missing) > MOST else ""
        raise ModelError(
            f"model: {path.parent} lacks parts of a split file: {', '.join(missing[:MOST])}{more}; fetch all "
            f"{len(paths)} parts into one folder"
        )
    return paths


def digest_of_parts(paths: Sequence[Path]) -> str:
    """Return the sha256 of a file, or that of the digests of several."""
    status = [path.stat() for path in paths]
    digests = [_sha256(path, s.st_size, s.st_mtime_ns) for path, s in zip(paths, status, strict=True)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


@lru_cache(maxsize=64)
def _sha256(path: Path, size: int, changed: int) -> str:
    return file_sha256(path)


def check_magic(path: Path) -> None:
    """Raise ModelError for a file that is no GGUF file."""
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf:
        reason = POINTED if is_pointer(path) else "is not a GGUF file (it does not begin with 'GGUF')"
        raise ModelError(f"model: {path} {reason}")


def open_parts(paths: Sequence[Path]) -> list[Any]:
    """Return the `GGUFReader` of each part.

    Raises:
        ModelError: for parts that state other numbers than their names, or that are not all of the tensors, and for
            a file without tensors.
        Exception: errors of the `gguf` package for a damaged file.
    """
    readers = [open_reader(path) for path in paths]
    tensors = sum(len(reader.tensors) for reader in readers)
    if not tensors:
        raise ModelError(f"model: {paths[0]} holds no tensors, only metadata; fetch the file of a model")
    for index, (path, reader) in enumerate(zip(paths, readers, strict=True)):
        for key, expected in ((NUMBER, index), (COUNT, len(paths)), (TENSORS, tensors)):
            field = reader.get_field(key)
            stated = {COUNT: 1, NUMBER: 0, TENSORS: tensors}[key] if field is None else int(field.contents())
            if stated != expected:
                raise ModelError(
                    f"model: {path} states {key} = {stated}, but it is {expected} by the names of the files and their "
                    "tensors; fetch all parts again, and name them FILE-00001-of-0000N.gguf, and so on"
                )
    return readers


def merge(paths: Sequence[Path], target: Path) -> None:
    """Write the parts of a split file as one file, one tensor in memory at a time. Raises as `open_parts`."""
    import gguf  # an optional dependency

    readers = open_parts(paths)
    writer = gguf.GGUFWriter(target, readers[0].get_field("general.architecture").contents())
    writer.data_alignment = readers[0].alignment
    for field in readers[0].fields.values():
        if not field.name.startswith(("GGUF.", "split.")) and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()
