"""Load a compressed checkpoint: the stock model with its compressed layers as CompressedLinear."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.checkpoint import Checkpoint, state_masks
from compress.checkpoint.containers.files import user_path
from compress.checkpoint.inference import allow_narrow_inputs, round_activations, share_inputs
from compress.checkpoint.saving import guard_saving
from compress.checkpoint.sources.files import read_tokenizer
from compress.checkpoint.sources.skeleton import read_config
from compress.decode import accelerate_generation
from compress.models.computation import compute_dtype, device_of, remember_storage
from compress.numerics.dtypes import dtype_name

log = logging.getLogger(__name__)


def load(
    folder: str | Path,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    compile: bool | None = None,
    verify: bool = False,
    activations: str | None = None,
    trainable: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load (model, tokenizer) from a folder written by `compress run`, the folder of a dense model, or a .gguf file.

    Packed weights stay packed and memory-mapped. A layer that the CPU kernels cover multiplies its codes; any other
    dequantizes its weight in every forward pass. Save such a model with `compress.save`.

    Args:
        dtype: dtype of computation. 'auto' is the dtype of the checkpoint, but float32 for bfloat16 on a processor
            without instructions for bfloat16 products, where bfloat16 is several times slower. Where CPU kernels
            compute a packed bfloat16 model or a .gguf file, 'auto' has float32 activations; weights stay as they are
            stored, and products may round their inputs to bfloat16 (those of llama.cpp round them to 8 bits). The
            name of a dtype is exact: with 'float32' products round nothing.
        compile: how `generate` decodes. None: on the CPU, by traced steps where this is possible: the operations of the
            first step run again without Python. True: the same, or by torch.compile with a static cache. False: by
            transformers.
        verify: first compare the sha256 of every file with that in SHA256SUMS, which checkpoints of compress have.
        activations: 'int8' rounds the inputs of layers of integer codes to int8 when they run, with a scale per token
            and group of the weight (per token where it has no groups), so that kernels multiply integers, as llama.cpp
            and ONNX Runtime do. None: as the checkpoint states.
        trainable: dense parameters get gradients, and are copied from the files; decoding is that of transformers.

    Raises:
        RecipeError: for a device that does not exist.
        ModelError: for other activations, a folder without a model, an unknown quantization method, and files that are
            damaged or missing.
    """
    checkpoint = Checkpoint.open(
        user_path(folder), dtype, device_of(device), trust_remote_code, inference=not trainable
    )
    for note in checkpoint.notes:  # of files that are not read; those of the model come later
        log.warning("%s: %s", checkpoint.folder, note)
    if verify:
        checkpoint.verify()
    model = checkpoint.fill().eval().requires_grad_(trainable)
    _, widened_from = checkpoint.dtypes
    if widened_from is not None:
        remember_storage(model, widened_from)
    format_rounds = dtype == "auto" and checkpoint.format is not None and checkpoint.format.rounds_inputs
    if widened_from is not None or format_rounds:
        allow_narrow_inputs(model)
    if activations is not None:
        round_activations(model, activations)
    state_masks(model.config, checkpoint.stated.masked)
    guard_saving(model)
    if trainable:
        for parameter in model.parameters():  # files are mapped into memory
            parameter.data = parameter.data.clone()
        return model, read_tokenizer(checkpoint.folder, trust_remote_code)
    share_inputs(model)
    if compile is None and not all(policy.traceable for policy in checkpoint.caches.values()):
        compile = False
    accelerate_generation(model, compile, has_packed_weights=checkpoint.format is not None)
    return model, read_tokenizer(checkpoint.folder, trust_remote_code)


def dtype_to_compare(folder: Path, dtype: str, device: torch.device) -> str:
    """The dtype in which models are compared: 'auto' is that in which a recipe computes the model, packed or dense."""
    if dtype != "auto":
        return dtype
    return dtype_name(compute_dtype(read_config(folder, str(folder), False), dtype, device)[0])
