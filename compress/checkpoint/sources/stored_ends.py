"""Embedding and head in the dtype of their file, mapped, in a model that is computed in a wider one.

A copy in the dtype of the computation is often the largest tensor of a run. Few rows of an embedding are read, and a
product with the head casts some rows at a time, so neither needs one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.checkpoint.sources.stored import headers_of
from compress.models.structure.ends import End, find_ends, replace_end
from compress.numerics.dtypes import SAFETENSORS

NARROW = (torch.bfloat16, torch.float16)
"""The stored dtypes whose numbers float32 holds exactly."""


class Files(Protocol):
    """Weights in files (`opening.Mapped`)."""

    def read_raw(self, names: list[str], waited: bool = False) -> dict[str, Tensor]:
        """Tensors by name in their stored dtype."""
        ...


def stored_ends(model: PreTrainedModel, files: Mapping[str, tuple[Path, str]], dtype: torch.dtype) -> dict[str, End]:
    """The ends of a model by the names of their weights, if these are stored in a narrower dtype than `dtype`.

    files: tensor name -> (file, name in the file).
    """
    ends = {f"{end.embedding or end.head}.weight": end for end in find_ends(model)}
    found = {name: end for name, end in ends.items() if name in files and files[name][0].suffix == ".safetensors"}
    headers = headers_of({name: files[name] for name in found})
    narrow = {n for n, header in headers.items() if SAFETENSORS.get(header.dtype) in NARROW}
    return {name: end for name, end in found.items() if name in narrow and dtype is torch.float32}


def map_ends(model: PreTrainedModel, ends: Mapping[str, End], weights: Files) -> None:
    """Map the weights of ends (`stored_ends`). If they are mapped already, pages that were read leave the process."""
    for name, end in ends.items():
        replace_end(model, end).put(weights.read_raw([name])[name])
