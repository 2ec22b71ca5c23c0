"""The 16-bit dtype that holds the weights of a model, for models that do not need float32.

Weights that are stored in 16 bits have that dtype. A .gguf file is converted to float32 (`checkpoint.sources.gguf`); if
its matrices had fewer bits, the conversion measures what float16 and bfloat16 lose and records the better one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint.containers.files import write_json
from compress.checkpoint.containers.gguf_header import open_reader
from compress.checkpoint.sources.stored import Place
from compress.checkpoint.sources.untrusted import read_json
from compress.models.computation import kept_dtype
from compress.numerics.dtypes import DTYPES, dtype_name

log = logging.getLogger(__name__)

RECORD = "compress_narrow.json"
"""The file of a converted model with the dtype that loses least, and the relative error of each."""
SPELLED = {"F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of the 16-bit dtypes."""
OWN = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": None}
"""GGUF's names of floats, with the 16-bit dtype that holds them exactly."""


def narrow_dtype(folder: Path, stored: Mapping[str, Place]) -> torch.dtype | None:
    """Return the 16-bit dtype of a model's matrices; None if one is wider or they differ. No weights are read."""
    record = folder / RECORD
    if record.exists():
        try:
            return DTYPES.get(str(read_json(record).get("dtype")))
        except ValueError:
            log.warning("%s cannot be read; the dtype of the file is not known", record)
            return None
    headers = [place.header for place in stored.values()]
    kinds = {header.dtype for header in headers if len(header.shape) > 1}
    dtypes = {SPELLED.get(kind) for kind in kinds if kind in (*SPELLED, "F32", "F64")}
    return dtypes.pop() if len(dtypes) == 1 else None


def rounded_tensors(model: nn.Module, places: Mapping[str, Place], dtype: torch.dtype) -> list[str]:
    """Return a note about stored tensors that are wider than the dtype in which the model is opened; none without any.

    Args:
        model: the model, whose tensors may be marked to stay in float32.
        places: stored tensors by their names in the model.
        dtype: that of config.json.
    """
    wide = [name for name, place in places.items() if place.header.dtype in ("F32", "F64")]
    wide = [name for name in wide if kept_dtype(model, name, dtype).itemsize == 2]
    if not wide:
        return []
    return [
        f"{len(wide)} of {len(places)} tensors are stored in float32, such as {wide[0]}, and rounded to "
        f"{dtype_name(dtype)}, the dtype of config.json; set dtype: float32 to keep them"
    ]


def record_narrow(folder: Path, path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `RECORD` for a .gguf file and its converted tensors, unless a matrix of the file is stored in float32."""
    kinds = {str(tensor.tensor_type.name) for tensor in open_reader(path).tensors if len(tensor.shape) > 1}
    if "F32" in kinds or "F64" in kinds:
        return
    file_dtypes = {OWN[kind] for kind in kinds} if kinds <= set(OWN) else set()
    errors = {dtype: rounding_error(tensors.values(), dtype) for dtype in (torch.float16, torch.bfloat16)}
    best = next(iter(file_dtypes)) if len(file_dtypes) == 1 else min(errors, key=lambda dtype: errors[dtype])
    values: dict[str, Any] = {"dtype": dtype_name(best), "errors": {dtype_name(d): e for d, e in errors.items()}}
    write_json(folder / RECORD, values)


def rounding_error(tensors: Iterable[Tensor], dtype: torch.dtype) -> float:
    """||round(w) - w|| / ||w|| over all float tensors; infinite if a weight exceeds the range of `dtype`."""
    lost = total = 0.0
    for tensor in (tensor for tensor in tensors if tensor.is_floating_point()):
        wide = tensor.double()
        lost += float((tensor.to(dtype).double() - wide).square().sum())
        total += float(wide.square().sum())
    return float("inf") if lost != lost or lost == float("inf") else (lost / total) ** 0.5 if total else 0.0
