"""Token ids: windows of a text, ids stored in a file, and checks that a model accepts them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.data.sources import OFFLINE, Part, texts
from compress.errors import CalibrationError
from compress.model.objective import is_masked, text_config


def token_ids(
    source: str,
    part: Part,
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int | None,
    length: int | None,
    seed: int,
) -> Int[Tensor, "sequences length"]:
    """Return int64 ids: `sequences` windows of `length` tokens that do not overlap.

    Text is tokenized without special tokens, joined (`token_stream`) and cut from its start (`windows`). The
    calibration part takes windows at random without replacement, the same ones for the same `seed`. The test part
    takes the first ones in order. `sequences=None` takes every window in order; text always needs a `length`. A .npy
    file holds ids ([n, m], integers): its first `sequences` rows and first `length` columns are taken, or all of them
    for None; `part`, `tokenizer` and `seed` are ignored.

    Raises `CalibrationError` when the source cannot provide the sequences.
    """
    for name, count in (("sequences", sequences), ("length", length)):
        if count is not None and count < 1:
            raise CalibrationError(f"{part}: {name} is {count}; use 1 or more")
    if Path(source).suffix == ".npy":
        return _stored_ids(Path(source), sequences, length)
    if length is None:
        raise CalibrationError(f"{part}: length is missing; {source} text needs one, such as length 2048")
    if tokenizer is None:
        raise CalibrationError(
            f"{part}: {source} text needs a tokenizer, and the model has none; use ids in a .npy file"
        )
    stream = token_stream(texts(source, part, tokenizer), tokenizer)
    cut = windows(stream, length)
    if len(cut) == 0:
        raise CalibrationError(
            f"{part}: {source} text has {len(stream)} tokens, fewer than one sequence of {length}; "
            f"use a shorter length, or another source"
        )
    if sequences is None:
        return cut
    if len(cut) < sequences:
        raise CalibrationError(
            f"{part}: {source} text has {len(cut)} sequences of {length} tokens, but sequences is {sequences}; "
            f"use sequences <= {len(cut)}, a shorter length, or another source"
        )
    if part == "test":
        return cut[:sequences].clone()
    return cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))[:sequences]]


def token_stream(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " tokens"]:
    """Tokenize each document and join them with the end-of-text token, or directly if there is none."""
    if not documents:
        return torch.empty(0, dtype=torch.int64)
    # verbose=False: a document may be longer than the model's context; it is cut into windows
    encoded = tokenizer(list(documents), add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    joined = list(encoded[0])
    for ids in encoded[1:]:
        joined += between
        joined += ids
    return torch.tensor(joined, dtype=torch.int64)


def windows(stream: Int[Tensor, " tokens"], length: int) -> Int[Tensor, "windows length"]:
    """Cut consecutive windows that do not overlap; the incomplete window at the end is dropped."""
    count = len(stream) // length
    return stream[: count * length].reshape(count, length)


def corpus_sha256(ids: Int[Tensor, "sequences length"]) -> str:
    """Return the hash of the ids, row by row, as little-endian int64."""
    return hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def extent(source: str, sequences: int | None, length: int | None) -> tuple[int, int]:
    """(sequences, length) that `token_ids` will return; 0: unknown before the text is read. Raises CalibrationError."""
    if Path(source).suffix == ".npy" and (sequences is None or length is None):
        rows, columns = _stored(Path(source)).shape
        return rows if sequences is None else sequences, columns if length is None else length
    return sequences or 0, length or 0


def _stored(path: Path) -> np.ndarray:
    """Memory-map the integers [n, m] of a .npy file."""
    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or error
        raise CalibrationError(f"calibration: cannot read {path}: {reason}; {OFFLINE}") from error
    except (ValueError, EOFError) as error:
        raise CalibrationError(
            f"calibration: {path} is not a plain .npy array ({error}); write integers with numpy.save"
        ) from error
    if stored.ndim != 2 or not np.issubdtype(stored.dtype, np.integer):
        raise CalibrationError(
            f"calibration: {path} holds {stored.dtype} of shape {list(stored.shape)}; "
            f"write an integer array of shape [sequences, length]"
        )
    return stored


def _stored_ids(path: Path, sequences: int | None, length: int | None) -> Int[Tensor, "sequences length"]:
    """Read the first `sequences` rows and `length` columns of an integer .npy file; None takes all."""
    stored = _stored(path)
    rows, columns = stored.shape
    asked = (rows if sequences is None else sequences, columns if length is None else length)
    if stored.size == 0 or asked[0] > rows or asked[1] > columns:
        raise CalibrationError(
            f"calibration: {path} holds {rows} sequences of {columns} tokens, but {asked[0]} sequences of {asked[1]} "
            f"are requested; use sequences <= {rows} and length <= {columns}, or another source"
        )
    ids = torch.from_numpy(stored[: asked[0], : asked[1]].astype(np.int64))
    if int(ids.min()) < 0:
        row, column = (ids < 0).nonzero()[0].tolist()
        raise CalibrationError(
            f"calibration: {path} holds {int(ids[row, column])} at [{row}, {column}]; write ids >= 0"
        )
    return ids


def model_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    source: str,
    part: Part,
    count: int | None,
    length: int | None,
    seed: int = 0,
) -> Int[Tensor, "count length"]:
    """Return the token ids of a text for a model; count and length None: all that a .npy file holds.

    For a masked language model, each window is placed between the special tokens that its tokenizer adds to a text;
    they count in `length`. The ids of a .npy file are not changed.

    Raises CalibrationError: no such text, too little text, ids outside the vocabulary, sequences longer than the
    model's positions, or a model without a tokenizer.
    """
    needed = None if source.endswith(".npy") else needs_tokenizer(tokenizer, part)
    if needed is not None and length is not None and is_masked(type(model), model.config):
        before, after = special_tokens_around(needed)
        if length <= len(before + after):
            raise CalibrationError(
                f"{part}: length {length} leaves no room between the special tokens; use a larger length"
            )
        ids = token_ids(source, part, needed, count, length - len(before + after), seed)
        left, right = (torch.tensor(side, dtype=ids.dtype).expand(len(ids), -1) for side in (before, after))
        ids = torch.cat([left, ids, right], dim=1)
    else:
        ids = token_ids(source, part, needed, count, length, seed)
    size = model.get_input_embeddings().get_parameter("weight").shape[0]
    if int(ids.max()) >= size:
        raise CalibrationError(
            f"{part}: {source} holds the token id {int(ids.max())}, but the model's vocabulary has {size}; "
            "use ids that were made with the model's own tokenizer"
        )
    longest: Any = getattr(text_config(model.config), "max_position_embeddings", None)
    if longest is not None and 0 < longest < ids.shape[1]:  # some configurations say -1: no limit
        raise CalibrationError(
            f"{part}: length {ids.shape[1]} exceeds the model's {longest} positions; use length <= {longest}"
        )
    if ids.shape[1] < 2:
        raise CalibrationError(f"{part}: {source} has one token per sequence, but a loss needs 2; use length >= 2")
    return ids


def special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer adds before and after a text."""
    bare, whole = (tokenizer("a", add_special_tokens=some).input_ids for some in (False, True))
    start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def needs_tokenizer(tokenizer: PreTrainedTokenizerBase | None, part: Part) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or raise CalibrationError when there is none."""
    if tokenizer is None:
        raise CalibrationError(f"{part}: the model has no tokenizer; use token ids in a .npy file")
    return tokenizer
