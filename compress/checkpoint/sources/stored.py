"""The tensors that a folder holds: names, files and shapes, from the headers of safetensors files or of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from compress.checkpoint.containers.gguf import GGUFTensors, open_gguf
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.containers.mapped import MappedTensors, open_mapped
from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.sources.weight_files import in_all_files, reading
from compress.errors import call_foreign


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
    return {name: place for name, (_, place) in in_all_files(folder, stored_in).items()}


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
    with reading(path):
        yield call_foreign(open_gguf, path) if path.name == FILE else open_mapped(path)
