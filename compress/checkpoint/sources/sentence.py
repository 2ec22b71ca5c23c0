"""The files of sentence-transformers in a model's folder: how hidden states become the embedding of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from compress.checkpoint.containers.files import is_inside
from compress.checkpoint.sources.untrusted import read_json, read_json_list
from compress.errors import ModelError

Pooling = Literal["mean", "first", "last"]
"""How the embedding of a text is made of the hidden states of its tokens: their mean, or that of one token."""

MODULES = "modules.json"
PLAIN = "*sentence*.json"
"""Its other files; one has the name of an architecture in its name."""
MODES: dict[str, Pooling] = {"pooling_mode_cls_token": "first", "pooling_mode_lasttoken": "last"}


def read_sentence_files(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The texts of the files by their paths, which travel with the checkpoint unchanged, and notes.

    A folder whose modules have weights of their own has none of them, and a note. Raises ModelError.
    """
    if not (folder / MODULES).exists():
        return {}, []
    parts, found = _modules(folder), {MODULES: (folder / MODULES).read_text("utf-8")}
    found |= {path.name: _text(path, folder) for path in sorted(folder.glob(PLAIN))}
    for part in parts:
        if not part.is_dir():
            continue  # such as the folder of a normalization, which has no files
        others = sorted(path.name for path in part.iterdir() if path.name != "config.json")
        if others:
            return {}, [f"{part.name}/{others[0]} of sentence-transformers was not copied, nor {MODULES}; copy them"]
        if (part / "config.json").exists():
            found[f"{part.name}/config.json"] = _text(part / "config.json", folder)
    return found, []


def pooling_in(files: Mapping[str, str]) -> Pooling:
    """How a model makes embeddings; the mean if none of its files says. files: as of `read_sentence_files`."""
    for name, text in files.items():
        values = json.loads(text) if name.endswith("/config.json") else {}
        for mode, pooling in MODES.items():
            if values.get(mode) is True:
                return pooling
    return "mean"


def _modules(folder: Path) -> list[Path]:
    """The folders of the modules after the model itself. Raises ModelError for a file that says none."""
    path = folder / MODULES
    try:
        names: list[Any] = [entry.get("path") for entry in read_json_list(path)]
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("each of its entries must have the path of a folder in the model's folder")
        parts = [folder / name for name in names if name]
        if outside := [part for part in parts if not is_inside(part, folder)]:
            raise ValueError(f"it names {outside[0].name}, which is outside of the folder")
    except ValueError as error:
        raise ModelError(f"model: {path} cannot be read: {error}; fetch it again") from error
    return parts


def _text(path: Path, folder: Path) -> str:
    """The text of a JSON file in a model's folder. Raises ModelError."""
    try:
        if not is_inside(path, folder):
            raise ValueError(f"it is a link to a file outside of {folder}")
        read_json(path)
    except ValueError as error:
        raise ModelError(f"model: {path} cannot be read: {error}; fetch it again") from error
    return path.read_text("utf-8")
