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
from compress.data.listed import lists_of
from compress.data.opening import needs_tokenizer, opening_tokens
from compress.data.text_source import TextSource, as_source
from compress.errors import CalibrationError, NumericError
from compress.evaluation.chunks import check_chunk, read_in_chunks
from compress.evaluation.divergence import SampledDistribution
from compress.evaluation.store import Results
from compress.models.forward import device_of_model
from compress.models.kinds.batch import IDS, IGNORED, Batch, Examples
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.contract import ModelKind
from compress.models.kinds.kinds import adapter_of, described
from compress.numerics.metrics import rows_of_chunk

Window = dict[str, Any]
"""The result of one window, as JSON: loss (sum in nats), tokens, bytes, seconds; kl, same and positions by target."""


@dataclass(frozen=True)
class WindowTask:
    """How windows are measured.

    Attributes:
        lm_objective: What the model predicts.
        tokenizer: Counts the bytes of tokens; None if the model comes without one.
        stride: Tokens from one window to the next; all windows but the first have targets in their last `stride` tokens
            only. None: windows do not overlap, and every token after the first of a window is a target.
        top_k: Number of most likely tokens that are stored of the base model; None for no divergence.
        base: Folder of the base model's stored tokens.
        role: Whether these tokens are written (base) or compared with (compressed).
        chunk: Tokens that the model reads at a time, with its KV cache between chunks; None for the whole window.
    """

    lm_objective: ModelKind = CAUSAL
    tokenizer: PreTrainedTokenizerBase | None = None
    stride: int | None = None
    top_k: int | None = None
    base: Path | None = None
    role: str = "compressed"
    chunk: int | None = None

    def key(self, index: int) -> str:
        """Return the key of a window's result."""
        chunk = "" if self.chunk is None else f", chunks of {self.chunk}"
        return f"window {index}{chunk}" + ("" if self.base is None else f", {self.role}, top {self.top_k}")

    def path(self, index: int) -> Path:
        """Return the file of the base model's stored tokens."""
        assert self.base is not None
        return self.base / f"{index:06}.safetensors"


def measure_windows(
    model: nn.Module,
    examples: Examples,
    task: WindowTask,
    results: Results,
    progress: Callable[[int, int], None] | None = None,
) -> list[Window]:
    """Measure every window; windows that are in `results` are not computed again.

    Args:
        model: Model to measure.
        examples: The windows.
        task: How windows are measured.
        results: Stored results.
        progress: Is called with (number of measured windows, number of windows) after every window.

    Raises:
        NumericError: if a loss is NaN.
    """

    def compute(indices: list[int]) -> None:
        for count, index in enumerate(indices, start=1):
            results.put([(task.key(index), measure_window(model, examples[index], index, task))])
            if progress is not None:
                progress(count, len(indices))

    return results.fill(range(len(examples)), task.key, compute)


@torch.no_grad()
def measure_window(model: nn.Module, window: Batch, index: int, task: WindowTask) -> Window:
    """Measure one window; masks and scored targets depend on its index."""
    begin, lm_objective = perf_counter(), task.lm_objective
    shown = Examples((window.to(device_of_model(model)),))
    if task.chunk is None:
        all_logits = lm_objective.read(model, shown, [index]).logits
    else:
        all_logits = read_in_chunks(model, shown[0].inputs[IDS], task.chunk)
    logits, targets = lm_objective.answers(all_logits, shown, [index])
    positions = (lm_objective.targets(shown, [index])[0] != IGNORED).nonzero()[:, 0] + lm_objective.shift
    if task.stride is not None and index > 0:
        scored = positions >= window.length - task.stride
        logits, targets, positions = logits[scored], targets[scored], positions[scored]
    rows = rows_of_chunk(logits.shape[-1])
    loss = sum(
        float(nn.functional.cross_entropy(part.float(), target_part, reduction="sum"))
        for part, target_part in zip(logits.split(rows), targets.split(rows), strict=True)
    )
    if math.isnan(loss):
        raise NumericError(
            f"the model's loss is NaN on window {index} of the evaluation text; evaluate it with dtype float32, or "
            "write its checkpoint again"
        )
    counts = len(positions) and lm_objective.streams
    size = bytes_of(window.inputs[IDS][0], int(positions[0]), task.tokenizer) if counts else None
    result: Window = {"loss": loss, "tokens": len(targets), "bytes": size}
    if task.base is not None and task.top_k is not None:
        result |= _compared(logits, positions, index, task.top_k, task)
    return result | {"seconds": perf_counter() - begin}


def _compared(logits: Tensor, positions: Tensor, index: int, top_k: int, task: WindowTask) -> dict[str, Any]:
    """Store the base model's tokens, or compare a variant with them, some rows at a time."""
    path, size = task.path(index), rows_of_chunk(logits.shape[-1])
    if task.role == "base":
        path.parent.mkdir(parents=True, exist_ok=True)
        SampledDistribution.in_chunks(logits, top_k, size).save(path)
        return {}
    stored = SampledDistribution.load(path)
    kl: list[float] = []
    agrees: list[int] = []
    for start in range(0, len(logits), size):
        rows = SampledDistribution(*(tensor[start : start + size] for tensor in stored))
        divergence, agreement = rows.divergence(logits[start : start + size])
        kl += divergence.tolist()
        agrees += agreement.int().tolist()
    return {"kl": kl, "same": agrees, "positions": positions.tolist()}


def bytes_of(ids: Int[Tensor, " length"], start: int, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """Count the bytes of the text of the tokens from `start` on, in UTF-8; special tokens have none."""
    if tokenizer is None:
        return None
    text, prefix = (
        str(tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for part in (ids, ids[:start])
    )
    return len(text.encode("utf-8", "replace")) - len(prefix.encode("utf-8", "replace"))


def check_windows(model: nn.Module, stride: int | None, chunk: int | None = None) -> None:
    """Check that a model can read windows that overlap or that come in chunks.

    Args:
        model: the model.
        stride: see `WindowTask`.
        chunk: see `WindowTask`.

    Raises:
        CalibrationError: if windows overlap that are no parts of a stream of text; as `check_chunk`.
    """
    check_chunk(model, chunk)
    lists = adapter_of(model).lists
    if stride is not None and lists is not None and lists.only:
        raise CalibrationError(
            f"test: stride {stride}: {described(model)}, each of which is one window; write stride: null"
        )


def evaluation_examples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: str | TextSource,
    count: int | None,
    length: int | None,
    stride: int | None = None,
    seed: int = 0,
) -> Sample:
    """Read the windows of an evaluation text.

    Args:
        model: Model that reads them.
        tokenizer: Its tokenizer.
        text: Name of a text, or a source.
        count: Number of windows; None for all.
        length: Tokens of a window.
        stride: See `WindowTask`.
        seed: Of the selection of documents.

    Returns:
        The windows, and the use of the text.

    Raises:
        CalibrationError: as `model_sample`, and for windows that cannot overlap.
    """
    check_windows(model, stride)
    source_facts, source = (model, tokenizer), as_source(text)
    if stride is None or stride == length:
        return model_sample(*source_facts, source, "test", count, length, seed)
    place = f"test: stride {stride}"
    if source.stored or not source.packing or not adapter_of(model).streams or lists_of(model, source) is not None:
        raise CalibrationError(f"{place} needs one stream of text and a model of next tokens; write stride: null")
    required_tokenizer = needs_tokenizer(tokenizer, "test")
    prefix = opening_tokens(source, required_tokenizer, "test")
    text_length = (length or 0) - len(prefix)  # tokens of the text in a window
    if length is None or stride > text_length:
        raise CalibrationError(f"{place} is longer than the text of a window; use stride <= {text_length}")
    check_text(*source_facts, source, "test", count, length)
    piece = gcd(text_length, stride)
    pieces = None if count is None else (text_length + (count - 1) * stride) // piece
    ids, use = sample(source, "test", required_tokenizer, pieces, piece, seed)
    check_vocabulary(ids, model, source, "test")
    if ids.numel() < text_length:
        raise CalibrationError(
            f"test: {source.label} has fewer tokens than one window of {length}; use a shorter length"
        )
    rows = ids.flatten().unfold(0, text_length, stride)
    rows = torch.cat([torch.tensor(prefix, dtype=ids.dtype).expand(len(rows), -1), rows], dim=1)
    return Examples.of_ids(rows), use.model_copy(
        update={"sequences": len(rows), "length": length, "bos": len(prefix) > 0}
    )
