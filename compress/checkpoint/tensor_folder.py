"""TensorFolder: the tensors and the other files of a folder, without the class of its model."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from compress.checkpoint.checkpoint import is_compressed
from compress.checkpoint.containers.digests import SUMS
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.sources.files import is_side_file
from compress.checkpoint.sources.gguf_parts import gguf_of
from compress.checkpoint.sources.hub import folder_of
from compress.checkpoint.sources.stated import stated_quantization
from compress.checkpoint.sources.stored import Place, stored_tensors
from compress.checkpoint.sources.tensor_roles import TensorRoles
from compress.checkpoint.sources.untrusted import check_folder, read_json
from compress.errors import ModelError

WEIGHTS = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".index"})
"""The suffixes of files with weights."""
WRITTEN = ("config.json", "README.md", "recipe.yaml", "report.*", "training.svg", "*.index.json", SUMS)
"""Files that are written anew, or that describe other weights."""


@dataclass(frozen=True)
class TensorFolder:
    """A folder with safetensors files and config.json.

    Attributes:
        folder: the folder.
        config: the content of config.json.
        places: file and header of every tensor by name.
        roles: the tensors by their roles.
    """

    folder: Path
    config: dict[str, Any]
    places: dict[str, Place]
    roles: TensorRoles

    @classmethod
    def open(cls, source: str) -> TensorFolder:
        """Open a local folder, or fetch a model of the hub.

        Raises:
            ModelError: for a folder without weights or config.json, damaged files, and a quantized model.
        """
        if gguf_of(source) is not None:
            raise ModelError(f"model: {source} is a .gguf file; name a folder with safetensors files")
        folder = folder_of(source)
        check_folder(folder)
        try:
            config = read_json(folder / "config.json")
        except ValueError as error:
            path = folder / "config.json"
            raise ModelError(f"model: {path}: {error}; it states the scheme of a checkpoint") from error
        if is_compressed(str(folder)) or stated_quantization(config, folder) is not None:
            raise ModelError(f"model: {source} is quantized already; start from its dense model")
        if (folder / FILE).exists():
            raise ModelError(f"model: {folder} holds {FILE}; name a folder with safetensors files")
        places = stored_tensors(folder)
        roles = TensorRoles.of({name: place.header for name, place in places.items()}, config)
        if roles.transposed:
            raise ModelError(
                f"model: {source} stores {roles.transposed[0]} as [in, out] (Conv1D), which no server reads quantized; "
                "quantize it by a run, which builds the model"
            )
        return cls(folder, config, places, roles)

    @property
    def files(self) -> list[Path]:
        """The files of weights in order."""
        return sorted({place.path for place in self.places.values()})

    def names_in(self, path: Path) -> list[str]:
        """Return the tensors of a file in the order of the file."""
        return [name for name, place in self.places.items() if place.path == path]

    def copied(self) -> dict[str, Path]:
        """Return the files that are copied unchanged, by relative path: tokenizer, templates, code, license."""
        paths = {
            path.relative_to(self.folder).as_posix(): path
            for pattern in ("*", "*/*")  # such as 1_Pooling/config.json
            for path in sorted(self.folder.glob(pattern))
        }
        return {
            name: path
            for name, path in paths.items()
            if path.is_file() and _is_copied(name) and is_side_file(path, self.folder)
        }


def _is_copied(name: str) -> bool:
    """Return whether a file, by its relative path, is copied unchanged if it is a regular one."""
    path = PurePosixPath(name)
    is_hidden = any(part.startswith(".") for part in path.parts)
    return not is_hidden and path.suffix not in WEIGHTS and not any(fnmatchcase(name, pattern) for pattern in WRITTEN)
