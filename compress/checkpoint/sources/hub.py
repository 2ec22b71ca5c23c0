"""The folder of a model: local, of a .gguf file, or of the Hugging Face hub: `name` or `name@revision`.

Models of the hub are fetched into the cache that transformers uses.

The token (HF_TOKEN, or that of `hf auth login`), HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and proxies are those of the
library huggingface_hub, which fetches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path

from compress.checkpoint.containers.digests import SUMS
from compress.checkpoint.sources import gguf
from compress.checkpoint.sources.gguf_parts import gguf_of
from compress.errors import ModelError, one_line

CONFIGURATION = ["*.json", "*.model", "*.txt", "*.jinja", SUMS, "README.md", "LICENSE*", "NOTICE*"]
WEIGHTS = "*.safetensors"
COPIES = ["consolidated*", "original/*"]
"""Weights in the layout of their authors, which some models have in addition to those of transformers."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
COMMIT = re.compile(r"[0-9a-f]{40}")

REMEDIES = {
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set and the cache does not hold it; unset it, or use a local folder",
    "LocalEntryNotFoundError": "the hub cannot be reached, or HF_HUB_OFFLINE is set, and the cache does not hold it; "
    "connect once to fetch it, or use a local folder",
    "GatedRepoError": "its owner grants access to accounts; accept its terms on the hub, then run `hf auth login` or "
    "set HF_TOKEN",
    "RevisionNotFoundError": "the hub has no such revision of it; write a branch, a tag or a commit after @",
    "RepositoryNotFoundError": "the hub has no model of this name, or it is private; correct the name, or run `hf auth "
    "login` or set HF_TOKEN",
}
"""What to do, by the class of huggingface_hub's error; derived classes first."""
STOPPED = (
    "could not be fetched from the hub ({}); use a local folder, a .gguf file, or a hub id that can be reached; files "
    "that were fetched are kept, and the same command continues"
)


def split_revision(source: str) -> tuple[str, str | None]:
    """(hub name, revision or None) of a source. A local path is a name without revision, whatever characters it has."""
    name, at, revision = source.partition("@")
    local = Path(expanduser(source)).exists() or name.startswith((".", "/", "~"))
    return (source, None) if local or not at else (name, revision)


def check_revision(source: str) -> None:
    """Raise ModelError for a revision of something that has none: a local folder, a file, or an empty revision."""
    name, revision = split_revision(source)
    if revision is None:
        if "@" in source and not Path(expanduser(source)).exists():
            place = source.partition("@")[0]
            if Path(expanduser(place)).exists():
                raise ModelError(f"model: {place} is local and has no revisions; write {place} without @")
        return
    if Path(expanduser(name)).exists():
        raise ModelError(f"model: {name} is local and has no revisions; write {name} without @")
    if not revision or not HUB_NAME.fullmatch(name):
        raise ModelError(
            f"model: {source} is no hub id with a revision; write OWNER/NAME@REVISION, where REVISION is a branch, a "
            "tag or a commit"
        )


def folder_of(source: str, weights: bool = True) -> Path:
    """Return a local folder that holds the model as safetensors; fetch or convert the model if needed.

    Args:
        source: hub id (also OWNER/NAME@REVISION), local folder, or path of a .gguf file (any part of a split one).
        weights: False: of a model of the hub, fetch all files but the weights.
    """
    file = gguf_of(source)
    return safetensors_folder(source, weights) if file is None else gguf.as_safetensors(file)


def safetensors_folder(source: str, weights: bool = True) -> Path:
    """Return a local folder as `folder_of` for a source that names no .gguf file."""
    path = Path(expanduser(source))
    check_revision(source)
    if path.is_dir():
        return path
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelError(f"model: no folder {source}; use a hub id, a local folder, or a .gguf file")
    return fetch(source, [*CONFIGURATION, WEIGHTS] if weights else CONFIGURATION)


def fetch_code(source: str) -> None:
    """Fetch the Python files of a model of the hub, next to its other files. Raises ModelError."""
    if not Path(expanduser(source)).exists():
        fetch(source, ["*.py"])


def fetch(source: str, patterns: Sequence[str]) -> Path:
    """The folder in the cache that holds a model of the hub; what is missing is fetched. Raises ModelError."""
    from huggingface_hub import snapshot_download  # slow to import and not needed for local models

    name, revision = split_revision(source)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=COPIES))
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        remedy = next((text for kind, text in REMEDIES.items() if kind in kinds), None)
        reason = STOPPED.format(f"{type(error).__name__}: {one_line(error)}") if remedy is None else remedy
        raise ModelError(f"model: {source} is not a local folder; {reason}") from error


def commit_of(folder: Path) -> str | None:
    """Return the commit of the hub that a folder of the cache holds; None for any other folder."""
    is_snapshot = folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) is not None
    return folder.name if is_snapshot else None


def at_commit(source: str, commit: str | None) -> str:
    """The source with the commit as its revision; without a commit the source as it is."""
    return source if commit is None else f"{split_revision(source)[0]}@{commit}"
