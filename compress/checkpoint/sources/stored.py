"""The tensors that a folder holds: names, files and shapes, from the headers of safetensors files or of a GGUF file."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os.path import exists
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from compress.checkpoint.containers.files import is_inside
from compress.checkpoint.containers.gguf import FILE, GGUFTensors, open_gguf
from compress.checkpoint.containers.mapped import MappedTensors, open_mapped
from compress.checkpoint.containers.safetensors import INDEX, Header
from compress.checkpoint.sources.untrusted import check_is_checkpoint, read_json
from compress.errors import CannotRun, ModelError, ShortageError, call_foreign

PICKLED = "pickled weights are not supported; convert them once: from_pretrained(dir).save_pretrained(out)"


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


class Place(NamedTuple):
    """A stored tensor: its file, its name there, and its header; with a member, one of the tensors that are stacked."""

    path: Path
    key: str
    header: Header
    member: int | None = None

    def read(self) -> Tensor:
        """Read the tensor; it is mapped where its file allows it."""
        return read_stored(self)

    def select(self, tensor: Tensor) -> Tensor:
        """Return this tensor of the one that is stored under the key."""
        return tensor if self.member is None else tensor[self.member]


def stored_tensors(folder: Path) -> dict[str, Place]:
    """Return every tensor of the files of weights of a folder, by name; every file is opened once to check it.

    Raises ModelError for a tensor that two files hold.
    """
    places: dict[str, Place] = {}
    for path in weight_files(folder):
        for name, place in stored_in(path).items():
            if name in places:
                raise ModelError(f"model: {name} is in {places[name].path} and in {path}; remove one of the files")
            places[name] = place
    return places


def stored_in(path: Path) -> dict[str, Place]:
    """Return every tensor of one file, by name."""
    with opened_file(path) as file:
        return {name: Place(path, name, header) for name, header in file.headers.items()}


def read_stored(place: Place) -> Tensor:
    """Read one tensor; it is mapped where its file allows it."""
    with opened_file(place.path) as file:
        return place.select(file.get_tensors([place.key])[place.key])


def by_owner(names: Iterable[str], owners: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that lie below each owner, such as the tensors of layers. No owner lies below another one."""
    groups: dict[str, list[str]] = {owner: [] for owner in owners}
    for name in names:
        above = name
        while above := above.rpartition(".")[0]:
            if above in groups:
                groups[above].append(name)
                break
    return groups


@contextmanager
def opened_file(path: Path) -> Iterator[MappedTensors | GGUFTensors]:
    """Open a safetensors file, memory-mapped, or a GGUF file; ModelError when it is missing, truncated or another."""
    try:
        if path.name == FILE:
            yield call_foreign(open_gguf, path)
            return
        yield open_mapped(path)
    except FileNotFoundError as error:
        reason = "is a link to a file that is missing" if path.is_symlink() else "is missing, but the index lists it"
        raise ModelError(f"model: {path} {reason}; fetch the model again") from error
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise ShortageError(
                f"memory: {path} cannot be mapped, since this process may not take more memory (ulimit -d, ulimit -v); "
                "raise its limit"
            ) from error
        raise ModelError(f"model: {path} is truncated or not a safetensors file ({error}); fetch it again") from error
    except (ValueError, CannotRun) as error:
        if path.name != FILE:
            raise
        cause = error.cause if isinstance(error, CannotRun) else error
        raise ModelError(f"model: {path} cannot be read ({cause})") from error
