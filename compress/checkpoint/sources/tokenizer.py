"""Read the tokenizer of a model's folder."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compress.checkpoint.sources.untrusted import check_tokenizer
from compress.errors import ModelError, one_line

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def read_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, or None when it has none. Raises ModelError."""
    if not any((folder / name).exists() for name in FILES):
        return None
    check_tokenizer(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises Exception itself
        there = ", ".join(name for name in FILES if (folder / name).exists())
        raise ModelError(
            f"model: the tokenizer in {folder} ({there}) cannot be read ({one_line(error)}); fetch it again"
        ) from error
