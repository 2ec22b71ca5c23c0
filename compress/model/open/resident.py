"""Which weights of an open model take memory that the system cannot take back, once they are brought."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from safetensors import safe_open
from torch import Tensor

from compress.model.open.opening import Mapped, OpenModel

SPELLED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Dtypes that can be computed in, as safetensors calls them."""


def held_bytes(opened: OpenModel, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the model's tensors, by full name, that are no views of a file.

    On a CPU a tensor that is stored in the dtype that is computed in is one; no weight is read to find out.
    """
    weights = opened.weights
    viewed = _viewed(weights, tensors) if isinstance(weights, Mapped) and weights.device.type == "cpu" else set()
    return sum(tensor.nbytes for name, tensor in tensors.items() if name not in viewed)


def _viewed(weights: Mapped, names: Iterable[str]) -> set[str]:
    """Those of the names whose tensors need no conversion."""
    places = {name: weights.files[name] for name in names if name in weights.files}
    found: set[str] = set()
    for path in {path for path, _ in places.values()}:
        with safe_open(path, framework="pt") as file:
            here = [(name, key) for name, (place, key) in places.items() if place == path]
            found |= {name for name, key in here if file.get_slice(key).get_dtype() == SPELLED[weights.dtype]}
    return found
