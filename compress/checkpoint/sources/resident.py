"""Measure the resident memory of an open model's weights: the weights that are not views of a memory-mapped file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from compress.checkpoint.sources.opening import Mapped, OpenModel
from compress.checkpoint.sources.stored import opened_file

SPELLED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""safetensors' names of the dtypes of computation."""


def held_bytes(opened: OpenModel, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the model's tensors, by full name, that are not views of a file.

    On a CPU, a tensor is a view of its file when it is stored in the dtype of computation. No weight is read.
    """
    weights = opened.weights
    viewed = _viewed(weights, tensors) if isinstance(weights, Mapped) and weights.device.type == "cpu" else set()
    return sum(tensor.nbytes for name, tensor in tensors.items() if name not in viewed)


def _viewed(weights: Mapped, names: Iterable[str]) -> set[str]:
    """The names whose tensors need no conversion."""
    places = {name: weights.files[name] for name in names if name in weights.files}
    found: set[str] = set()
    for path in {path for path, _ in places.values() if path.suffix == ".safetensors"}:  # GGUF tensors are copied
        with opened_file(path) as file:
            here = [(name, key) for name, (place, key) in places.items() if place == path]
            found |= {name for name, key in here if file.get_slice(key).get_dtype() == SPELLED[weights.dtype]}
    return found
