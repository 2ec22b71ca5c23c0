"""The files of weights of a folder, and the headers in them, without torch."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os.path import exists
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from compress.checkpoint.containers.files import POINTED, is_inside, is_pointer
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.containers.safetensors import INDEX, Header, read_headers
from compress.checkpoint.sources.untrusted import check_is_checkpoint, read_json
from compress.errors import CannotRun, ModelError, ShortageError

T = TypeVar("T")

PICKLED = "pickled weights are not supported; convert them once: from_pretrained(dir).save_pretrained(out)"
MOST = 5  # names in a message


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model: its GGUF file, those of its index, model.safetensors, or all of the folder.

    Raises ModelError for a folder without weights, and for an index that cannot be read or that names a file elsewhere.
    """
    index, single_file = folder / INDEX, folder / "model.safetensors"
    if (folder / FILE).exists():
        if single_file.exists() or index.exists():
            raise ModelError(
                f"model: {folder} holds {FILE} and safetensors files; name the .gguf file to read it, or remove the "
                "weights that are not those of the model"
            )
        return [folder / FILE]
    if index.exists():
        paths = _listed(index, folder)
        if single_file not in paths and all(exists(path) for path in (single_file, *paths)):  # no OSError for any name
            raise ModelError(
                f"model: {folder} holds the shards of {INDEX} and {single_file.name}, which it does not list; "
                "remove the weights that are not those of the model"
            )
    else:
        paths = [single_file] if single_file.exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        check_is_checkpoint(folder)
        raise ModelError(f"model: {folder} holds no .safetensors file; {PICKLED}")
    return paths


def _listed(index: Path, folder: Path) -> list[Path]:
    try:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("its weight_map must be an object that gives each tensor the name of a file")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not file.endswith(".safetensors"):
                raise ValueError(f"it says that {name[:200]} is in {str(file)[:200]!r}, which is no .safetensors file")
        files = sorted(set(weight_map.values()))
        if outside := [file for file in files if not is_inside(folder / file, folder)]:
            raise ValueError(f"it names {outside[0][:200]!r}, which is outside of the folder")
    except (ValueError, OSError, RuntimeError) as error:
        raise ModelError(f"model: {index} is not an index of weights ({error}); fetch it again") from error
    return [folder / file for file in files]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report that a file of weights is missing, truncated or another as ModelError, or as ShortageError."""
    try:
        yield
    except FileNotFoundError as error:
        reason = "is a link to a file that is missing" if path.is_symlink() else "is missing, but the index lists it"
        raise ModelError(f"model: {path} {reason}; fetch the model again") from error
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise ShortageError(
                f"memory: {path} cannot be mapped, since this process may not take more memory (ulimit -d, ulimit -v); "
                "raise its limit"
            ) from error
        is_clone = isinstance(error, SafetensorError) and is_pointer(path)
        reason = POINTED if is_clone else f"is truncated or not a safetensors file ({error}); fetch it again"
        raise ModelError(f"model: {path} {reason}") from error
    except (ValueError, CannotRun) as error:
        if path.name != FILE:
            raise
        cause = error.cause if isinstance(error, CannotRun) else error
        raise ModelError(f"model: {path} cannot be read ({cause})") from error


def headers_in(path: Path) -> dict[str, Header]:
    """Return the header of every tensor of one safetensors file, by name. Raises ModelError or ShortageError."""
    with reading(path):
        return {name: header for name, (header, _) in read_headers(path).items()}


def in_all_files(folder: Path, read: Callable[[Path], Mapping[str, T]]) -> dict[str, tuple[Path, T]]:
    """Return what is read of every tensor of the files of weights of a folder, by name, with its file.

    Args:
        folder: the folder of a model.
        read: returns what it reads of each tensor of a file.

    Raises:
        ModelError: as `weight_files`, for files that are missing, and for a tensor that two files hold.
    """
    places: dict[str, tuple[Path, T]] = {}
    paths = weight_files(folder)
    missing = [path.name for path in paths if not exists(path)]
    if len(missing) > 1:  # one is named by `reading`
        more = f" and {len(missing) - MOST} more" if len(missing) > MOST else ""
        raise ModelError(
            f"model: {folder} lacks {len(missing)} of {len(paths)} files of weights that its index lists: "
            f"{', '.join(missing[:MOST])}{more}; fetch the model again"
        )
    for path in paths:
        for name, value in read(path).items():
            if name in places:
                raise ModelError(f"model: {name} is in {places[name][0]} and in {path}; remove one of the files")
            places[name] = path, value
    return places
