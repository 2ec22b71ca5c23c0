"""Open one block of each kind of a model, to plan with it from its configuration alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from compress.checkpoint.checkpoint import Checkpoint
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.opening import with_placeholders
from compress.checkpoint.sources.gguf_parts import gguf_of
from compress.checkpoint.sources.hub import fetch_code, folder_of
from compress.checkpoint.sources.limits import limited_modules, stored_bytes
from compress.checkpoint.sources.skeleton import empty_model
from compress.checkpoint.sources.supported import check_supported
from compress.errors import ModelError
from compress.models.experts import open_experts
from compress.models.structure.blocks import find_blocks

UNKNOWN = "[UNK]"


def open_kinds_of_blocks(
    source: str, dtype: str = "auto", trust_remote_code: bool = False, device: torch.device | None = None
) -> tuple[OpenModel, tuple[int, ...]]:
    """Open the first blocks of a model, as many as show every kind of block, from its configuration alone.

    Blocks are of one kind if their tensors have equal names and shapes. The rest of the blocks is built without experts
    as separate linears, and dropped, so that a mixture of 45,000 linears takes a second and few bytes.

    Args:
        source: as of `open_for_plan`; weights are not read, also where they are there.
        dtype: as of `open_model`.
        device: the device of computation of the planned run, which need not be there.

    Returns:
        (the model, the number of blocks of the whole model that each of its blocks stands for).

    Raises:
        ModelError: for a model that is not found, damaged or not supported, and for a .gguf file.
    """
    if gguf_of(source) is not None:
        raise ModelError(f"model: {source} has no config.json to plan from; plan without a hardware")
    folder = folder_of(source, weights=False)
    if trust_remote_code:
        fetch_code(source)
    checkpoint = Checkpoint(folder, source, dtype, device or torch.device("cpu"), trust_remote_code=trust_remote_code)
    checkpoint.stored = {}
    narrow = checkpoint.narrow_dtype
    model = empty_model(folder, checkpoint.stated.config, checkpoint.dtype, trust_remote_code).eval()
    check_supported(model, f"model: {source}")
    counts = _truncated(model)
    with limited_modules(folder / "config.json", stored_bytes(folder)):
        checkpoint.notes = open_experts(model)
    opened = with_placeholders(checkpoint, model)
    if opened.tokenizer is None:
        opened.tokenizer = _substitute_tokenizer()
        opened.notes.append("planned without the tokenizer of the model")
    if checkpoint.format is not None:
        opened.notes.append(
            f"the source is quantized already ({checkpoint.format.name}); the plan is that of its dequantized model"
        )
    return replace(opened, narrow=narrow, device=torch.device("cpu")), counts


def _substitute_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of one token: a plan asks whether there is one, and reads no text."""
    tokenizer = Tokenizer(WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN, eos_token=UNKNOWN)


def _truncated(model: PreTrainedModel) -> tuple[int, ...]:
    """Drop the blocks after the first ones of all kinds; return how many blocks each of these stands for."""
    blocks = find_blocks(model)
    kinds = [tuple((name, tuple(t.shape)) for name, t in block.module.state_dict().items()) for block in blocks]
    first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    last = max(first.values()) + 1
    if any(block.stack for block in blocks) or last == len(blocks):
        return (1,) * len(blocks)
    block_list = model.get_submodule(blocks[0].name.rpartition(".")[0])
    assert isinstance(block_list, nn.ModuleList)
    del block_list[last:]
    return tuple(1 + kinds[last:].count(kinds[i]) * (first[kinds[i]] == i) for i in range(last))
