"""Collect the result of a run: sizes, digests, versions, records of passes, and measurements."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.containers.files import file_sha256, tensor_file_bytes
from compress.checkpoint.opened import OpenModel
from compress.data.overlap import CalibrationRuns
from compress.data.records import TextUse
from compress.native.library import instruction_set
from compress.numerics.dtypes import dtype_name
from compress.passes.contract.context import Run
from compress.recipe.sensitivities import FILE as SENSITIVITY
from compress.results.result import FormatResult, Predicted, Reproduction, RunResult, Sizes, Verification
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


@dataclass(frozen=True)
class CheckpointFacts:
    """Facts about a checkpoint.

    Attributes:
        size: Its sizes.
        predicted: The prediction of the plan.
        verified: Its comparison with the computed model.
        masked: Full names of linears with pruned weights.
        formats: The checkpoint in further formats.
    """

    size: Sizes
    predicted: Predicted
    verified: Verification
    masked: Sequence[str]
    formats: Mapping[str, FormatResult] = field(default_factory=dict)


@dataclass(frozen=True)
class PassRecords:
    """Records of the passes of a run.

    Attributes:
        layers: The fields of `LayerResult`, in the order of the model.
        training: The fields of `TrainingRecord` by the label of the pass.
    """

    layers: Sequence[Mapping[str, Any]]
    training: Mapping[str, Any]


def run_result(
    opened: OpenModel,
    run: Run,
    folder: Path,
    checkpoint: CheckpointFacts,
    passes: PassRecords,
    evaluations: Mapping[str, Any],
    reproduce: Reproduction,
) -> RunResult:
    """Collect the result of a run.

    Args:
        opened: The base model.
        run: The run, with its journal and its costs.
        folder: The folder of the checkpoint.
        checkpoint: Facts about the checkpoint.
        passes: Records of the passes.
        evaluations: The results of all evaluators by key.
        reproduce: Everything that determines the bytes.
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
        "size": checkpoint.size,
        "layers": passes.layers,
        "masked": list(checkpoint.masked),
        "formats": dict(checkpoint.formats),
        "costs": run.costs,
        "training": passes.training,
        "reading": asdict(opened.weights.reading),
        "predicted": checkpoint.predicted,
        "verified": checkpoint.verified,
        "journal": {"counts": run.journal.counts(), "entries": run.journal.entries},
        "reproduce": reproduce,
        "files": files,
        "checkpoint_sha256": digest_of_files(files),
    }
    return RunResult.from_json(values | dict(evaluations))


def reproduction(
    recipe: Mapping[str, Any],
    opened: OpenModel,
    run: Run,
    fingerprint: str,
    code: Mapping[str, str],
    texts: Sequence[TextUse],
    reads_data: bool,
) -> Reproduction:
    """Collect everything that determines the bytes of a checkpoint.

    Args:
        recipe: The resolved recipe, as plain values without folders of this machine.
        opened: The base model.
        run: The run.
        fingerprint: Digest of the run, of its manifest.
        code: Digests of the sources of passes, of its manifest.
        texts: Texts of calibration and evaluation.
        reads_data: Whether a pass reads the calibration data.
    """
    calibration = run.calibration
    assert calibration is not None
    return Reproduction(
        recipe=dict(recipe),
        fingerprint=fingerprint,
        code=dict(code),
        calibration_sha256=calibration.sha256(),
        calibration_runs=CalibrationRuns.of(calibration).sketch() if reads_data else None,
        texts=list(texts),
        compute_dtype=dtype_name(opened.dtype),
        storage_dtype=dtype_name(run.storage),
        device=str(opened.device),
        threads=torch.get_num_threads(),
        kernels=instruction_set(),
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in PACKAGES},
    )


def sizes(
    folder: Path,
    source_bytes: int | None,
    dense_bytes: int,
    tensor_bytes: int,
    compressed: Sequence[tuple[int, int]],
) -> Sizes:
    """Compute the sizes of a checkpoint.

    Args:
        folder: Its folder.
        source_bytes: Bytes of the weight files of the source; None if they are unknown.
        dense_bytes: Bytes of the uncompressed model in the storage dtype.
        tensor_bytes: Bytes of its tensors.
        compressed: (weights, bytes) of every layer that passes worked on.
    """
    weights = sum(count for count, _ in compressed)
    packed = sum(size_bytes for _, size_bytes in compressed)
    return Sizes(
        source_bytes=source_bytes,
        dense_bytes=dense_bytes,
        tensor_bytes=tensor_bytes,
        checkpoint_bytes=tensor_file_bytes(folder),
        compressed_layers=len(compressed),
        compressed_weights=weights,
        compressed_bytes=packed,
        bits_per_weight=8 * packed / weights,
    )


def checkpoint_files(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of the checkpoint by file name, without `DESCRIPTIONS`."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in DESCRIPTIONS)
    return {name: file_sha256(folder / name) for name in names}


def digest_of_files(files: Mapping[str, str]) -> str:
    """Return one digest of the sha256 of files by name."""
    return hashlib.sha256("".join(f"{n} {h}\n" for n, h in files.items()).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
