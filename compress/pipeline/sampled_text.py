"""Text that the model of a run samples: sampled once for a model and its options, and read again by later runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from compress.checkpoint.containers.files import atomic
from compress.checkpoint.opened import OpenModel
from compress.data.conversations import turns_of
from compress.data.opening import needs_tokenizer, opening_tokens
from compress.data.self_sampling import Sampling, self_sampled
from compress.data.text_source import TextSource
from compress.evaluation.store import digest_of, shared_results
from compress.passes.contract.memory import available_bytes
from compress.version import __version__

MEMORY_SHARE = 0.5
"""Share of the memory that all weights may take to be in memory while text is sampled; the rest is for the cache of
keys and values and for what the process has."""


def sampled_ids(
    opened: OpenModel, text: TextSource, sequences: int, length: int, seed: int, memory_bytes: int | None = None
) -> tuple[Int[Tensor, "sequences length"], bool]:
    """Return token ids that a model samples. A resumed run gets the same ids, with any number of threads.

    Args:
        opened: The model.
        text: Has the options of sampling.
        sequences: Number of sequences.
        length: Tokens of a sequence.
        seed: Seed of all draws.
        memory_bytes: Limit of memory of the process; None: what is available.

    Returns:
        The ids, and whether each sequence begins with tokens that the tokenizer adds before a text.

    Raises:
        CalibrationError: for a model that cannot generate text, one without a tokenizer, and conversations without a
            chat template that frames them.
    """
    tokenizer = needs_tokenizer(opened.tokenizer, "calibration")
    prefix = tuple(opening_tokens(text, tokenizer, "calibration"))
    turns = turns_of(tokenizer) if text.conversations else None
    if turns is not None:
        prefix = prefix if turns.opening[: len(prefix)] == prefix else ()
    sampling = Sampling(None, prefix, text.temperature, text.max_repetition, turns)
    path = _stored_file(opened, sampling, sequences, length, seed)
    if path is not None and path.exists():
        return torch.from_numpy(np.load(path)), len(prefix) > 0
    context = opened.whole() if fits_whole(opened, memory_bytes) else opened.streaming()
    with context as model:
        ids = self_sampled(model, tokenizer, sequences, length, seed, sampling)
    if path is not None:
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.save(file, ids.numpy())
    return ids, len(prefix) > 0


def fits_whole(opened: OpenModel, memory_bytes: int | None = None) -> bool:
    """Return whether all weights of a model may be in memory at once; otherwise each token reads them from the disk."""
    limit = available_bytes(opened.device) if memory_bytes is None else memory_bytes
    return weights_bytes(opened.model) <= MEMORY_SHARE * limit


def weights_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all weights of a model, which may be without values."""
    return sum(parameter.numel() for parameter in model.parameters()) * model.dtype.itemsize


def _stored_file(opened: OpenModel, sampling: Sampling, sequences: int, length: int, seed: int) -> Path | None:
    """Return the file of the ids in the user's cache; None for a model of a program, and where nothing can be written.

    The cache of results of models has a limit of size, and loses what is unused for longest.
    """
    folder = shared_results(opened.answers_digest) if opened.answers_digest else None
    if folder is None:
        return None
    facts = str(opened.dtype), len(opened.tokenizer or ()), __version__, asdict(sampling), sequences, length, seed
    return folder / opened.answers_digest[:16] / f"sampled-{digest_of(*facts)}.npy"
