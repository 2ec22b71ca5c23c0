"""Perplexity of any model, compressed or not, on named texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compress import corpus
from compress.errors import CalibrationError
from compress.evaluate.perplexity import Perplexity, perplexity
from compress.model.load import load
from compress.model.open import folder_of


def evaluate_texts(
    source: str, texts: Sequence[str], windows: int | None, length: int | None, dtype: str = "auto"
) -> dict[str, Perplexity]:
    """Perplexity by text for a checkpoint folder, a hub id or a .gguf file.

    Raises ModelError, CalibrationError.
    """
    model, tokenizer = load(Path(folder_of(source)), dtype)
    found = {}
    for text in texts:
        if tokenizer is None and not text.endswith(".npy"):
            raise CalibrationError(f"{source} has no tokenizer; give token ids in a .npy file")
        ids = corpus.token_ids(text, "test", tokenizer, windows, length, 0)
        found[text] = perplexity(model, ids)
    return found
