"""The training state on disk: one safetensors file, written atomically, from which a killed run resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.checkpoint.containers.files import atomic
from compress.numerics.dtypes import bytes_of
from compress.train.sharded import shard_like

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def digest(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Hash the options and the initial tensors of a training."""
    sha256 = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in tensors.items():
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha256.update(bytes_of(tensor.cpu()).numpy().tobytes())
    return sha256.hexdigest()


def tensors_of(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    moments: Mapping[Tensor, Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Collect all tensors on which the next step depends, by their names in the file."""
    tensors = {f"parameter/{name}": p.detach() for name, p in parameters.items()}
    tensors |= {f"buffer/{name}": tensor for name, tensor in buffers.items()}
    tensors |= {f"best/{name}": tensor for name, tensor in best.items()}
    for name, parameter in parameters.items():
        parameter_moments = moments.get(parameter, {})
        tensors |= {f"{moment}/{name}": parameter_moments[moment] for moment in MOMENTS if moment in parameter_moments}
    return tensors


def write_state(path: Path, key: str, record: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the training state. If writing fails, the previous file stays intact.

    Args:
        path: path of the file.
        key: digest of the training.
        record: JSON values.
        tensors: the result of `tensors_of`, unsharded.

    Raises:
        SaveError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as part:
        save_file(tensors, part, metadata={"format": "pt", "key": key, "state": json.dumps(record)})


def read_state(
    path: Path,
    key: str,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    moments: MutableMapping[Tensor, Any],
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Load the tensors of the same training in place.

    Returns:
        The JSON values and the best state, or None if there is no state of this training.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != key:
                return None
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  not a dict
    except (FileNotFoundError, SafetensorError):
        return None
    for name, parameter in parameters.items():
        parameter.detach().copy_(shard_like(tensors[f"parameter/{name}"], parameter))
        loaded = {m: tensors[f"{m}/{name}"] for m in MOMENTS if f"{m}/{name}" in tensors}
        if loaded:
            moments[parameter] = {m: t if m == "step" else shard_like(t, parameter) for m, t in loaded.items()}
    for name, buffer in buffers.items():
        buffer.copy_(tensors[f"buffer/{name}"])
    best = {name.removeprefix("best/"): t for name, t in tensors.items() if name.startswith("best/")}
    return json.loads(metadata["state"]), best
