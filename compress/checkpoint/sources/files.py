"""Files in a model's folder other than its weights: those of its processor, and the fingerprint of all."""

from __future__ import annotations

import hashlib
from pathlib import Path

from compress.checkpoint.sources.untrusted import read_json
from compress.errors import ModelError

SAMPLE_BYTES = 1 << 16  # a fingerprint reads this many bytes at each of SAMPLES places of a file, to be fast
SAMPLES = 64

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model with images or sound among its inputs; they travel with the checkpoint, unchanged."""


def read_processor(folder: Path) -> dict[str, str]:
    """The text of each of `PROCESSOR_FILES` in a folder. Raises ModelError for one that is no JSON."""
    found = {}
    for path in (folder / name for name in PROCESSOR_FILES):
        try:
            if path.exists():
                read_json(path)
                found[path.name] = path.read_text("utf-8")
        except ValueError as error:
            raise ModelError(f"model: {path} cannot be read: {error}; fetch it again") from error
    return found


def fingerprint_of(folder: Path, paths: list[Path]) -> str:
    """A digest of config.json and of the size and samples of every weight file; the same on every machine."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(i * size // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def stamp_of(path: Path) -> tuple[int, ...]:
    """What differs if a file is replaced or changed: its number on the disk, its size and the time of its change."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
