"""Open any model as the input of a run: dense or sparse models, and compressed checkpoints."""

from __future__ import annotations

import torch

from compress.checkpoint.caches import install_policies
from compress.checkpoint.checkpoint import Checkpoint
from compress.checkpoint.masks import MaskPolicy, with_masks
from compress.checkpoint.opened import OpenModel, Weights
from compress.checkpoint.sources.files import read_sentence_files, read_side_files, read_tokenizer
from compress.checkpoint.sources.hub import commit_of
from compress.checkpoint.sources.narrow import narrow_dtype
from compress.checkpoint.sources.supported import check_supported
from compress.models.computation import widened
from compress.models.experts import open_experts
from compress.models.structure.blocks import find_blocks


def open_model(
    source: str,
    dtype: str = "auto",
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    masks: MaskPolicy = "keep",
    codes: bool = False,
    narrow_ends: bool = False,
) -> OpenModel:
    """Open a model as the input of a run; weights of blocks are loaded when they are needed.

    Args:
        source: hub id (also OWNER/NAME@REVISION), local folder, or path of a .gguf file.
        dtype: dtype of computation: 'auto' (that of the checkpoint), 'float32', 'bfloat16' or 'float16'.
        masks: 'keep': pruned weights stay zero; 'forget': the zeros of linears that are not quantized are ordinary
            weights.
        codes: a .gguf file of another program keeps its codes, if they are known; otherwise it is a dense model.
        narrow_ends: embedding and head of a dense model stay in a narrower dtype of their file.

    Raises:
        ModelError: for a model that is not found, damaged or not supported. Weights of blocks are checked when they are
            loaded.
    """
    checkpoint = Checkpoint.open(source, dtype, device or torch.device("cpu"), trust_remote_code, codes)
    folder, model = checkpoint.folder, checkpoint.skeleton().eval()
    check_supported(model, f"model: {source}")
    texts, notes = read_sentence_files(folder)
    conversion = []
    if checkpoint.places is None:
        model, weights, ends = checkpoint.converted(), Weights(), {}
        open_experts(model)
        install_policies(model, "", checkpoint.tensors, checkpoint.caches)
        conversion = [
            "the checkpoint stores tensors under other names or shapes, so transformers loaded the whole model"
        ]
        blocks = find_blocks(model)
    else:
        blocks, weights = find_blocks(model), Weights(checkpoint)
        ends = checkpoint.outside(blocks, weights.reading, narrow_ends)
    notes = [*notes, *checkpoint.notes, *widened(checkpoint.dtypes[1]), *conversion]
    dense_places = {name: checkpoint.tensors.files[name] for name in checkpoint.dense_names}
    opened = OpenModel(
        model,
        blocks,
        weights,
        read_tokenizer(folder, trust_remote_code),
        source,
        checkpoint.fingerprint,
        checkpoint.device,
        checkpoint.dtype,
        notes,
        read_side_files(folder, trust_remote_code) | texts,
        narrow_dtype(folder, checkpoint.stored if checkpoint.format is None else dense_places),
        checkpoint.dtypes[1],
        commit_of(folder),
        ends,
    )
    return with_masks(opened, checkpoint.stated.masked, masks)
