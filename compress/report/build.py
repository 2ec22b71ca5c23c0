"""Build a Report from the values that a run hands over."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.containers.files import file_sha256, tensor_file_bytes
from compress.checkpoint.sources.opening import OpenModel
from compress.data.ids import TextUse
from compress.numerics.dtypes import dtype_name
from compress.passes.contract.context import Run
from compress.recipe.schema import Recipe
from compress.recipe.sensitivities import FILE as SENSITIVITY
from compress.report.schema import Predicted, Report, Reproduction, Sizes, Verification
from compress.version import __version__

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "safetensors",
    "numpy",
    "compressed-tensors",
    "gguf",
)
DESCRIPTIONS = ("report.json", "report.md", "report.html", "training.svg", "recipe.yaml", "README.md", SENSITIVITY)
"""Files of an output folder that are not part of the checkpoint."""


def build_report(
    opened: OpenModel,
    run: Run,
    folder: Path,
    *,
    size: Sizes,
    predicted: Predicted,
    verified: Verification,
    layers: Sequence[Mapping[str, Any]],
    masked: Sequence[str],
    training: Mapping[str, Any],
    evaluations: Mapping[str, Any],
    reproduce: Reproduction,
) -> Report:
    """The report on the checkpoint in `folder`.

    layers: the fields of `LayerRow`, in the order of the model. masked: names of pruned linears. training: the fields
    of `Training` by the label of the pass. evaluations: the results of all evaluators by key.
    """
    files = checkpoint_files(folder)
    values = {
        "compress": __version__,
        "model": {
            "source": reproduce.recipe["model"],
            "class": type(opened.model).__name__,
            "fingerprint": opened.fingerprint,
            "commit": opened.commit,
        },
        "size": size,
        "layers": layers,
        "masked": list(masked),
        "costs": {name: asdict(cost) for name, cost in run.costs.items()},
        "training": training,
        "reading": asdict(opened.weights.reading),
        "predicted": predicted,
        "verified": verified,
        "journal": {
            "counts": run.journal.counts(),
            "entries": [asdict(entry) for entry in run.journal.entries],
        },
        "reproduce": reproduce,
        "files": files,
        "checkpoint_sha256": hashlib.sha256("".join(f"{n} {h}\n" for n, h in files.items()).encode()).hexdigest(),
    }
    return Report.from_json(values | dict(evaluations))


def reproduction(
    recipe: Recipe,
    opened: OpenModel,
    run: Run,
    fingerprint: str,
    code: Mapping[str, str],
    calibration_sha256: str,
    texts: Sequence[TextUse] = (),
) -> Reproduction:
    """All that the bytes of a run depend on. fingerprint, code: as in its manifest. texts: what was read."""
    return Reproduction(
        recipe=recipe.model_dump(mode="json"),
        fingerprint=fingerprint,
        code=dict(code),
        calibration_sha256=calibration_sha256,
        texts=list(texts),
        compute_dtype=dtype_name(opened.dtype),
        storage_dtype=dtype_name(run.storage),
        device=str(opened.device),
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in PACKAGES},
    )


def sizes(folder: Path, dense_bytes: int, tensor_bytes: int, compressed: Sequence[tuple[int, int]]) -> Sizes:
    """The sizes of the checkpoint in `folder`; compressed: (weights, bytes) of every layer that passes worked on."""
    weights = sum(count for count, _ in compressed)
    packed = sum(size_bytes for _, size_bytes in compressed)
    return Sizes(
        dense_bytes=dense_bytes,
        tensor_bytes=tensor_bytes,
        checkpoint_bytes=tensor_file_bytes(folder),
        compressed_layers=len(compressed),
        compressed_weights=weights,
        compressed_bytes=packed,
        bits_per_weight=8 * packed / weights,
    )


def checkpoint_files(folder: Path) -> dict[str, str]:
    """The sha256 of every file of the checkpoint, by file name; `DESCRIPTIONS` are not part of it."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in DESCRIPTIONS)
    return {name: file_sha256(folder / name) for name in names}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
