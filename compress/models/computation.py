"""The dtype in which a model is computed, and the device of its computed buffers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dis import get_instructions
from functools import cache
from inspect import unwrap
from itertools import pairwise

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from compress.errors import ModelError, RecipeError
from compress.layers.linear import READ_DIRECTLY, linears
from compress.native.library import available
from compress.numerics.dtype_names import dtype_hint
from compress.numerics.dtypes import DTYPES, dtype_name, fast_dtype

DEVICES = r"auto|cpu|cuda(:\d+)?"
"""Regular expression of the values of `device`."""


def device_of(name: str | torch.device) -> torch.device:
    """Return the device of computation; 'auto' is CUDA if a CUDA device exists.

    Raises:
        RecipeError: when this machine has no such device, or the name is none of a device.
    """
    name = str(name)
    if not re.fullmatch(DEVICES, name):
        raise RecipeError(f"device {name!r} is not known; use auto, cpu, cuda, or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(("cuda" if count else "cpu") if name == "auto" else name)
    if device.type == "cuda" and (device.index or 0) >= count:
        available = f"only cuda:0 to cuda:{count - 1}" if count else "no CUDA device that torch can use"
        raise RecipeError(f"device: {name} does not exist: this machine has {available}; write device: auto, or cpu")
    return device


def compute_dtype(config: PretrainedConfig, dtype: str, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of computation, and that of the checkpoint if 'auto' chooses a wider one.

    Args:
        config: configuration of the model.
        dtype: a name, or 'auto': the dtype of the configuration, or float32 if it has none or if it is bfloat16 and the
            processor computes bfloat16 slowly (`fast_dtype`).
        device: device of computation.

    Raises:
        ModelError: if the dtype is unknown.
    """
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} is not known{dtype_hint(dtype)}")
        return DTYPES[dtype], None
    stated = getattr(config, "dtype", None)
    if isinstance(stated, torch.dtype) and stated not in DTYPES.values():
        names = ", ".join(DTYPES)
        raise ModelError(
            f"model: config.json states the dtype {dtype_name(stated)}; choose a dtype of computation: {names}"
        )
    dtype_of_config = stated if isinstance(stated, torch.dtype) else torch.float32
    fast = fast_dtype(dtype_of_config, device)
    return fast, None if fast == dtype_of_config else dtype_of_config


def inference_dtype(compute: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of activations where `auto` computes a packed model in `compute`.

    On a CPU with kernels it is float32 instead of bfloat16: kernels multiply weights as they are stored, so only
    activations are wider, and torch's attention of one token takes a tenth of the time that it takes in bfloat16.
    """
    wider = compute == torch.bfloat16 and device.type == "cpu" and available()
    return torch.float32 if wider else compute


KEPT = "compress_kept"
"""The attribute of a module with tensors that stay in float32: the 16-bit dtypes in whose place, by tensor."""
HALVES = (torch.float16, torch.bfloat16)


def mark_kept(model: nn.Module, narrow_model: nn.Module | None = None) -> None:
    """Mark the tensors that transformers keeps in float32 in a 16-bit model, such as those of a router.

    They are those of `_keep_in_fp32_modules` (in float16) and `_keep_in_fp32_modules_strict`, and those that the class
    of the model creates in float32 whatever the dtype of the model is.

    Args:
        narrow_model: the model of the same class and configuration in 16 bits; None: `model`, if it has 16 bits.
    """
    if not isinstance(model, PreTrainedModel):
        return
    narrow_model = narrow_model or (model if next(model.parameters()).dtype in HALVES else None)
    if narrow_model is not None:
        for name, tensor in narrow_model.state_dict(keep_vars=True).items():
            if tensor.dtype is torch.float32:
                _mark(model, name, HALVES)
    for dtype in HALVES:
        plan = model._get_dtype_plan(dtype)
        if not plan:
            continue
        pattern, _, _ = build_glob_alternation(list(plan))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and pattern.search(name):
                _mark(model, name, (dtype,))


def _mark(model: nn.Module, name: str, dtypes: Iterable[torch.dtype]) -> None:
    owner, _, leaf = name.rpartition(".")
    marks = vars(model.get_submodule(owner)).setdefault(KEPT, {})
    marks[leaf] = marks.get(leaf, frozenset()) | frozenset(dtypes)


def kept_dtype(module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor of a module in a model of `dtype`: float32 if it is marked (`mark_kept`)."""
    owner, _, leaf = name.rpartition(".")
    try:
        marks = vars(module.get_submodule(owner)).get(KEPT, {})
    except AttributeError:  # a tensor of the files that belongs to no module, such as codes
        return dtype
    return torch.float32 if dtype in marks.get(leaf, ()) else dtype


def is_always_float32(module: nn.Module) -> bool:
    """Return whether the weight of a module stays in float32 in every model of 16 bits, as that of some routers."""
    return all(kept_dtype(module, "weight", dtype) is torch.float32 for dtype in HALVES)


def mark_read(model: nn.Module) -> None:
    """Mark the linears whose weights a forward pass reads itself; the weight of a compressed one is then cast."""
    for name, module in linears(model).items():
        if reads_weight(model, name):
            vars(module)[READ_DIRECTLY] = True


def reads_weight(model: nn.Module, name: str) -> bool:
    """Return whether a forward pass reads the weight of a layer itself, as in `x.to(self.lm_head.weight.dtype)`.

    Such a weight must have the dtype of the computation. The code of the module that holds the layer is searched.

    Args:
        name: of the layer.
    """
    owner, _, leaf = name.rpartition(".")
    return _reads_weight(type(model.get_submodule(owner)), leaf)


@cache
def _reads_weight(owner: type[nn.Module], leaf: str) -> bool:
    functions = [getattr(owner, key) for key in dir(owner)]
    forwards = [unwrap(f) for f in functions if callable(f) and "forward" in getattr(f, "__name__", "")]
    codes = [f.__code__ for f in forwards if hasattr(f, "__code__")]
    loads = ([i.argval for i in get_instructions(code)] for code in codes)
    return any((leaf, "weight") in pairwise(names) for names in loads)


STORAGE = "compress_storage"
"""The attribute of a model in a wider dtype than that of its checkpoint: the dtype of the checkpoint."""


def remember_storage(model: PreTrainedModel, stored: torch.dtype) -> None:
    """Record the dtype of the checkpoint of a model whose activations are wider."""
    vars(model)[STORAGE] = stored


def widened_from(model: PreTrainedModel) -> torch.dtype | None:
    """Return the dtype of the checkpoint of a model whose activations are wider; None for another model."""
    dtype: torch.dtype | None = vars(model).get(STORAGE)
    return dtype


def storage_of(model: PreTrainedModel) -> torch.dtype:
    """Return the default dtype in which scales and dense tensors of a model are stored."""
    return widened_from(model) or next(model.parameters()).dtype


def widened(stored: torch.dtype | None) -> list[str]:
    """Return a note about a computation in float32 where the checkpoint is in `stored`; none if that is None."""
    if stored is None:
        return []
    name = dtype_name(stored)
    return [
        f"this processor has no instructions for {name} products, so the computation is in float32, block by block; "
        f"the weights stay mapped and are stored in {name} (dtype: {name} computes in it)"
    ]


def to_device(model: nn.Module, device: torch.device) -> None:
    """Move all tensors that are not on the meta device: computed buffers such as rotary frequencies."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
