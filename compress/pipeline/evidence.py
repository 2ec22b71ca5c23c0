"""report.json: everything measured, and everything needed to do it again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compress.api.context import Run
from compress.errors import VerificationError
from compress.formats.containers.files import file_sha256
from compress.model.open.opening import OpenModel
from compress.numerics.dtypes import dtype_name
from compress.pipeline.checkpoint import Manifest
from compress.pipeline.plan import Plan
from compress.pipeline.verify import Verified
from compress.recipe.schema import Recipe
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
DESCRIPTIONS = ("report.json", "report.md", "report.html", "training.svg", "recipe.yaml")


def build_report(
    recipe: Recipe,
    opened: OpenModel,
    run: Run,
    manifest: Manifest,
    planned: Plan,
    ended: Plan,
    verified: Verified,
    quality: list[dict[str, Any]],
    calibration_sha256: str,
    sparsity: dict[str, Any] | None,
    cached: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All sections of report.json; ended: the plan with what was known only after calibration (`plan.settle`).

    sparsity: what `check_sparsity` found. cached: of `cache_report`.

    Raises VerificationError when the checkpoint has another size than that.
    """
    _check_size(manifest, ended)
    files = checkpoint_files(manifest.folder)
    return {
        "compress": __version__,
        "model": {
            "source": recipe.model,
            "class": type(opened.model).__name__,
            "fingerprint": opened.fingerprint,
        },
        "size": _sizes(manifest.folder, ended),
        "quality": quality,
        "layers": [r for block in opened.blocks for r in manifest.shards[block.name].results],
        "sparsity": sparsity,
        "kv_cache": cached,
        "costs": {name: asdict(cost) for name, cost in run.costs.items()},
        "training": manifest.training,
        "predicted": {"tensor_bytes": planned.checkpoint_bytes, "memory_bytes": planned.memory_bytes},
        "verified": asdict(verified),
        "journal": {
            "counts": run.journal.counts(),
            "entries": [asdict(entry) for entry in run.journal.entries],
        },
        "reproduce": {
            "recipe": recipe.model_dump(mode="json"),
            "fingerprint": manifest.fingerprint,
            "calibration_sha256": calibration_sha256,
            "compute_dtype": dtype_name(opened.dtype),
            "storage_dtype": dtype_name(run.storage),
            "device": str(opened.device),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in PACKAGES},
        },
        "files": files,
        "checkpoint_sha256": hashlib.sha256("".join(f"{n} {h}\n" for n, h in files.items()).encode()).hexdigest(),
    }


def _check_size(manifest: Manifest, ended: Plan) -> None:
    written = sum(entry.size_bytes for entry in manifest.shards.values())
    if written != ended.checkpoint_bytes:
        raise VerificationError(
            f"{manifest.folder}: holds {written} bytes of tensors, but the plan predicted {ended.checkpoint_bytes}"
        )


def checkpoint_files(folder: Path) -> dict[str, str]:
    """sha256 of every file of the checkpoint, the descriptions of the run apart, by name."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in DESCRIPTIONS)
    return {name: file_sha256(folder / name) for name in names}


def _sizes(folder: Path, planned: Plan) -> dict[str, Any]:
    """Bytes and bits per weight, of the whole model and of the linears that were worked on."""
    touched = [layer for layer in planned.layers if layer.passes]
    weights = sum(layer.shape[0] * layer.shape[1] for layer in touched)
    packed = sum(layer.size_bytes for layer in touched)
    return {
        "dense_bytes": planned.dense_bytes,
        "tensor_bytes": planned.checkpoint_bytes,
        "checkpoint_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "compressed_layers": len(touched),
        "compressed_weights": weights,
        "compressed_bytes": packed,
        "bits_per_weight": 8 * packed / weights,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
