"""Sample calibration text from the model itself (LLM-QAT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CalibrationError
from compress.models.kinds.kinds import adapter_of, described
from compress.models.kinds.masked import special_ids
from compress.models.structure.ends import vocabulary_size

GREEDY_TOKENS = (3, 5)  # LLM-QAT, sec. 3.1: range of the number of greedy tokens after the first; the rest is sampled


def self_sampled(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int,
    length: int,
    seed: int,
    batch: int = 8,
    prefix: Sequence[int] = (),
) -> Int[Tensor, "sequences length"]:
    """Sample calibration text from the model itself (LLM-QAT, https://arxiv.org/abs/2305.17888, sec. 3.1).

    Each sequence starts with one token drawn uniformly from the vocabulary without its special tokens. The next 3 to 5
    tokens (one number per batch) are the most likely ones; all later tokens are sampled from the full softmax. The
    model's end tokens are suppressed, so every sequence has `length` tokens. The result (int64, on the CPU) depends on
    `seed` and `batch`. The global random state is not changed. prefix: tokens that every sequence begins with.

    Raises `CalibrationError` for a count below 1, and for a model that cannot generate text.
    """
    if not adapter_of(model).streams:
        raise CalibrationError(
            f"calibration: {described(model)} and cannot generate text (source self); use "
            "another source, such as embedded, or a .txt, .jsonl or .npy file"
        )
    for name, count in (("sequences", sequences), ("length", length), ("batch", batch)):
        if count < 1:
            raise CalibrationError(f"self: {name} is {count}; use 1 or more")
    starts = _start_ids(model, tokenizer)
    on_gpu = [model.device] if model.device.type == "cuda" else []
    rows = []
    with torch.random.fork_rng(devices=on_gpu):
        torch.manual_seed(seed)
        for begin_row in range(0, sequences, batch):
            size = min(batch, sequences - begin_row)
            ids = starts[torch.randint(len(starts), (size, 1))]
            begin = torch.tensor(prefix, dtype=ids.dtype).expand(size, -1)
            ids = torch.cat([begin, ids], dim=1)[:, :length].to(model.device)
            low, high = GREEDY_TOKENS
            greedy = min(int(torch.randint(low, high + 1, ())), length - ids.shape[1])
            ids = _continue(model, tokenizer, ids, greedy, sample=False)
            rows.append(_continue(model, tokenizer, ids, length - ids.shape[1], sample=True).cpu())
    return torch.cat(rows)


def _start_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " ids"]:
    """The ids of the vocabulary without special tokens."""
    special = set(special_ids(tokenizer))
    size = min(len(tokenizer), vocabulary_size(model))
    return torch.tensor([token for token in range(size) if token not in special])


def _continue(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    ids: Int[Tensor, "batch tokens"],
    count: int,
    sample: bool,
) -> Int[Tensor, "batch longer"]:
    """Append `count` tokens, sampled from the softmax or greedy, without end tokens before the last."""
    if count == 0:
        return ids
    # omitted values are filled from the model's own generation config, such as its end tokens
    softmax = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    chosen = GenerationConfig(
        do_sample=sample,
        repetition_penalty=1.0,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        **softmax,
    )
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=chosen)
