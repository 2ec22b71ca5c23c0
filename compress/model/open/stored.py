"""The tensors that a folder holds: names, files and shapes, from the headers of safetensors files or of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from compress.errors import ModelError
from compress.formats.containers.gguf import FILE, open_gguf

PICKLED = "pickled weights are not supported; convert them once: from_pretrained(dir).save_pretrained(out)"


def stored_tensors(folder: Path) -> dict[str, tuple[Path, str]]:
    """Tensor name -> (file, name) for all safetensors files of a folder; every file is opened once to check it."""
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    if (folder / FILE).exists():
        paths = [folder / FILE]
    elif index.exists():
        try:
            paths = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"model: {index} is not an index of weights ({error}); fetch it again") from error
    else:
        paths = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"model: {folder} holds no .safetensors file; {PICKLED}")
    return {name: place for path in paths for name, place in stored_in(path).items()}


def stored_in(path: Path) -> dict[str, tuple[Path, str]]:
    """Tensor name -> (file, name) for one safetensors file."""
    with opened_file(path) as file:
        return {name: (path, name) for name in file.keys()}  # noqa: SIM118  not a dict


@contextmanager
def opened_file(path: Path) -> Iterator[Any]:
    """Open a safetensors file, memory-mapped, or a GGUF file; ModelError when it is missing, truncated or another."""
    try:
        if path.name == FILE:
            yield open_gguf(path)
            return
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise ModelError(f"model: {path} is missing, but the index lists it; fetch the model again") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"model: {path} is truncated or not a safetensors file ({error}); fetch it again") from error
    except (ValueError, LookupError, TypeError, ImportError) as error:
        if path.name != FILE:
            raise
        raise ModelError(f"model: {path} cannot be read ({error})") from error


def stored_shapes(stored: dict[str, tuple[Path, str]]) -> dict[str, tuple[int, ...]]:
    """The shape of every stored tensor by name."""
    return {name: tuple(shape) for name, shape in shapes_of(stored)}


def shapes_of(files: dict[str, tuple[Path, str]]) -> Iterator[tuple[str, torch.Size]]:
    """(name in the model, shape in the file) of every tensor."""
    for path in sorted({path for path, _ in files.values()}):
        with opened_file(path) as file:
            for name, (place, key) in files.items():
                if place == path:
                    yield name, torch.Size(file.get_slice(key).get_shape())
