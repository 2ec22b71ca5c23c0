"""Measure a model on one window of token ids: its loss, its bytes, and its divergence from the base model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.data.ids import Sample, check_text, check_vocabulary, model_sample, sample
from compress.data.opening import needs_tokenizer, opening_tokens
from compress.data.text_source import TextSource, as_source
from compress.errors import CalibrationError, NumericError
from compress.evaluate.divergence import Kept
from compress.evaluate.store import Results
from compress.models.kinds.kinds import RECORDED, described, kind_of, reads_whole_texts
from compress.models.kinds.objective import IGNORED, NEXT_TOKENS, LMObjective
from compress.numerics.metrics import rows_of_chunk

Window = dict[str, Any]
"""The result of one window, as JSON: loss (sum in nats), tokens, bytes, seconds; kl, same and positions by target."""


@dataclass(frozen=True)
class WindowTask:
    """How windows are measured.

    stride: tokens from one window to the next; the windows after the first have targets in their last `stride` tokens
    alone. None: windows do not overlap, and every token after the first of a window is a target. base: the folder of
    the base model's kept tokens; which: whether they are written (base) or compared with (compressed).
    """

    lm_objective: LMObjective = NEXT_TOKENS
    tokenizer: PreTrainedTokenizerBase | None = None
    stride: int | None = None
    top_k: int | None = None
    base: Path | None = None
    which: str = "compressed"

    def key(self, index: int) -> str:
        """The key of a window's result."""
        return f"window {index}" + ("" if self.base is None else f", {self.which}, top {self.top_k}")

    def path(self, index: int) -> Path:
        """The file of the base model's kept tokens."""
        assert self.base is not None
        return self.base / f"{index:06}.safetensors"


def measure_windows(
    model: nn.Module,
    ids: Int[Tensor, "windows length"],
    task: WindowTask,
    results: Results,
    progress: Callable[[int, int], None] | None = None,
) -> list[Window]:
    """The result of every window; windows that are in `results` are not computed again.

    progress(done, of) is called after every window. Raises NumericError when a loss is NaN.
    """

    def compute(indices: list[int]) -> None:
        for done, index in enumerate(indices, start=1):
            results.put([(task.key(index), measure_window(model, ids[index], index, task))])
            if progress is not None:
                progress(done, len(indices))

    return results.fill(range(len(ids)), task.key, compute)


@torch.no_grad()
def measure_window(model: nn.Module, ids: Int[Tensor, " length"], index: int, task: WindowTask) -> Window:
    """The result of one window. index: its number, which masks and scored targets depend on."""
    begin, lm_objective = perf_counter(), task.lm_objective
    shown = ids[None].to(next(model.parameters()).device)
    logits, targets = lm_objective.answers(lm_objective.read(model, shown, [index]).logits, shown, [index])
    positions = (lm_objective.targets(shown, [index])[0] != IGNORED).nonzero()[:, 0] + (lm_objective is NEXT_TOKENS)
    if task.stride is not None and index > 0:
        scored = positions >= len(ids) - task.stride
        logits, targets, positions = logits[scored], targets[scored], positions[scored]
    rows = rows_of_chunk(logits.shape[-1])
    found = sum(
        float(nn.functional.cross_entropy(part.float(), wanted, reduction="sum"))
        for part, wanted in zip(logits.split(rows), targets.split(rows), strict=True)
    )
    if math.isnan(found):
        raise NumericError(
            f"the model's loss is NaN on window {index} of the evaluation text; evaluate it with --dtype float32, or "
            "write its checkpoint again"
        )
    size = bytes_of(ids, int(positions[0]), task.tokenizer) if len(positions) and lm_objective is NEXT_TOKENS else None
    window: Window = {"loss": found, "tokens": len(targets), "bytes": size}
    if task.base is not None and task.top_k is not None:
        window |= _compared(logits, positions, index, task.top_k, task)
    return window | {"seconds": perf_counter() - begin}


def _compared(logits: Tensor, positions: Tensor, index: int, top_k: int, task: WindowTask) -> dict[str, Any]:
    """Keep the base model's tokens, or compare a variant with them, some rows at a time."""
    path, size = task.path(index), rows_of_chunk(logits.shape[-1])
    if task.which == "base":
        path.parent.mkdir(parents=True, exist_ok=True)
        Kept.in_chunks(logits, top_k, size).save(path)
        return {}
    known = Kept.load(path)
    kl: list[float] = []
    same: list[int] = []
    for start in range(0, len(logits), size):
        rows = Kept(*(tensor[start : start + size] for tensor in known))
        divergence, agreement = rows.divergence(logits[start : start + size])
        kl += divergence.tolist()
        same += agreement.int().tolist()
    return {"kl": kl, "same": same, "positions": positions.tolist()}


def bytes_of(ids: Int[Tensor, " length"], first: int, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The bytes of the text of the tokens from `first` on, in UTF-8; special tokens have none."""
    if tokenizer is None:
        return None
    whole, before = (
        str(tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for part in (ids, ids[:first])
    )
    return len(whole.encode("utf-8", "replace")) - len(before.encode("utf-8", "replace"))


def check_stride(model: nn.Module, stride: int | None) -> None:
    """Raise CalibrationError for windows that overlap where a window is a recording."""
    if stride is not None and kind_of(model) is RECORDED:
        raise CalibrationError(
            f"test: stride {stride}: {described(model)}, each of which is one window; write stride: null"
        )


def evaluation_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: str | TextSource,
    count: int | None,
    length: int | None,
    stride: int | None = None,
    seed: int = 0,
) -> Sample:
    """Token ids of an evaluation text, [windows, length], and its use. stride: see `WindowTask`.

    Raises CalibrationError as `model_sample`, and for windows that overlap where they cannot.
    """
    check_stride(model, stride)
    known, source = (model, tokenizer), as_source(text)
    if stride is None or stride == length:
        return model_sample(*known, source, "test", count, length, seed)
    where = f"test: stride {stride}"
    if source.stored or not source.packing or reads_whole_texts(model):
        raise CalibrationError(f"{where} needs one stream of text and a model of next tokens; write stride: null")
    given = needs_tokenizer(tokenizer, "test")
    prefix = opening_tokens(source, given, "test")
    own = (length or 0) - len(prefix)  # tokens of the text in a window
    if length is None or stride > own:
        raise CalibrationError(f"{where} is longer than the text of a window; use stride <= {own}")
    check_text(*known, source, "test", count, length)
    piece = gcd(own, stride)
    pieces = None if count is None else (own + (count - 1) * stride) // piece
    ids, use = sample(source, "test", given, pieces, piece, seed)
    check_vocabulary(ids, model, source, "test")
    if ids.numel() < own:
        raise CalibrationError(
            f"test: {source.label} has fewer tokens than one window of {length}; use a shorter length"
        )
    rows = ids.flatten().unfold(0, own, stride)
    rows = torch.cat([torch.tensor(prefix, dtype=ids.dtype).expand(len(rows), -1), rows], dim=1)
    return rows, use.model_copy(update={"sequences": len(rows), "length": length, "bos": len(prefix) > 0})
