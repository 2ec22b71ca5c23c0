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
from compress.train.sharded import like

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def digest(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The hash that identifies a training: its options and its initial tensors."""
    found = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(bytes_of(tensor.cpu()).numpy().tobytes())
    return found.hexdigest()


def tensors_of(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    moments: Mapping[Tensor, Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """All tensors that the next step depends on, by their names in the file."""
    tensors = {f"parameter/{name}": p.detach() for name, p in parameters.items()}
    tensors |= {f"buffer/{name}": tensor for name, tensor in buffers.items()}
    tensors |= {f"best/{name}": tensor for name, tensor in best.items()}
    for name, parameter in parameters.items():
        found = moments.get(parameter, {})
        tensors |= {f"{moment}/{name}": found[moment] for moment in MOMENTS if moment in found}
    return tensors


def write_state(path: Path, key: str, record: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the training state. record: JSON values; tensors: the result of `tensors_of`, unsharded.

    Raises SaveError; the previous file then stays intact.
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
    """Load the tensors of the same training in place and return (JSON values, best state), or None if there is none."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("key") != key:
                return None
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  not a dict
    except (FileNotFoundError, SafetensorError):
        return None
    for name, parameter in parameters.items():
        parameter.detach().copy_(like(tensors[f"parameter/{name}"], parameter))
        loaded = {m: tensors[f"{m}/{name}"] for m in MOMENTS if f"{m}/{name}" in tensors}
        if loaded:
            moments[parameter] = {m: t if m == "step" else like(t, parameter) for m, t in loaded.items()}
    for name, buffer in buffers.items():
        buffer.copy_(tensors[f"buffer/{name}"])
    best = {name.removeprefix("best/"): t for name, t in tensors.items() if name.startswith("best/")}
    return json.loads(about["state"]), best
