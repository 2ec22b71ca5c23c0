"""SHA256SUMS: the digest of every file that a checkpoint is loaded from, in the form that `sha256sum --check` reads.

<64 hexadecimal digits>  <name of a file in the folder>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from compress.checkpoint.containers.files import file_sha256, is_inside, write_text
from compress.errors import ModelError

SUMS = "SHA256SUMS"
LOADED = frozenset({".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja"})
"""The suffixes of files that are read from a model's folder; each must be listed."""
OTHERS = frozenset({"report.json"})
"""Files with such a suffix that are no part of the model."""
WORK = ".compress"
"""The folder inside of an output folder that holds the manifest and the files of an unfinished run."""
MANIFEST = "manifest.json"
"""The file inside of `WORK` with the state of the run."""
LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\\0]+)")
LARGEST = 1 << 24  # bytes


def write_digests(folder: Path, names: Iterable[str], computed: Mapping[str, str] | None = None) -> None:
    """Write SHA256SUMS for some files of a folder.

    Args:
        folder: the folder.
        names: names of the files.
        computed: digests by file that need not be computed again.
    """
    digests = {name: (computed or {}).get(name) or file_sha256(folder / name) for name in sorted(set(names))}
    write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def read_digests(folder: Path) -> dict[str, str]:
    """Return the digests that a folder states, by file. Raises ModelError if it states none."""
    path = folder / SUMS
    try:
        if path.exists() and not (path.is_file() and is_inside(path, folder)):
            raise ValueError("it is not a regular file of the folder")
        if path.stat().st_size > LARGEST:
            raise ValueError("it is too large")
        lines = path.read_bytes().decode("utf-8").splitlines()
    except FileNotFoundError as error:
        raise ModelError(
            f"model: {folder} has no file {SUMS}, so its files cannot be checked; checkpoints that compress wrote "
            "have one: fetch it again"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"model: {path} cannot be read ({error}); fetch it again") from error
    digests = {}
    for number, line in enumerate(lines, 1):
        matched = LINE.fullmatch(line)
        if matched is None or matched[2] in (".", ".."):
            raise ModelError(f"model: {path}, line {number}, is not a digest and the name of a file; fetch it again")
        digests[matched[2]] = matched[1]
    return digests


def damaged(folder: Path) -> dict[str, str]:
    """Return what is wrong with each file of a checkpoint that is not as it was written; empty if all are.

    A file that loading might read must be listed in SHA256SUMS. Raises ModelError if the folder states no digests.
    """
    sums, reasons = read_digests(folder), {}
    for name, digest in sums.items():
        path = folder / name
        try:
            if not is_inside(path, folder):
                reasons[name] = f"is a link to a file outside of {folder}"
                continue
            actual = file_sha256(path) if path.is_file() else None
        except (OSError, RuntimeError) as error:
            reasons[name] = f"cannot be read ({error})"
            continue
        if actual is None:
            reasons[name] = "is missing"
        elif actual != digest:
            reasons[name] = f"is damaged: its sha256 is {actual[:12]}..., but {SUMS} says {digest[:12]}..."
    present = {path.name for path in folder.iterdir() if path.suffix in LOADED and not path.is_dir()}
    reasons |= dict.fromkeys(sorted(present - sums.keys() - OTHERS), f"is not listed in {SUMS}")
    return reasons


def verify_digests(folder: Path) -> None:
    """Check every file of a checkpoint against SHA256SUMS. Raises ModelError with a line for each damaged file."""
    reasons = damaged(folder)
    if reasons:
        lines = "\n".join(f"{folder / name} {reason}; fetch it again" for name, reason in reasons.items())
        raise ModelError(f"model: {lines}")
