"""The special tokens around a text, and those that a sequence of text begins with."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from compress.data.text_source import Part, TextSource
from compress.errors import CalibrationError


def special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before and after a text."""
    bare, ids = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    start = next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), None)
    if start is None:  # the text itself is tokenized differently between special tokens
        return [], []
    return ids[:start], ids[start + len(bare) :]


def opening_tokens(source: TextSource, tokenizer: PreTrainedTokenizerBase, part: Part) -> list[int]:
    """The tokens that each sequence begins with, by `source.bos`; models predict badly without those they know.

    Raises CalibrationError when the token is asked for and the tokenizer has none.
    """
    if source.bos is None:
        return special_tokens_around(tokenizer)[0]
    bos: Any = tokenizer.bos_token_id
    if source.bos and bos is None:
        raise CalibrationError(f"{part}: bos: the tokenizer has no beginning-of-sequence token; leave bos out")
    return [bos] if source.bos else []


def needs_tokenizer(tokenizer: PreTrainedTokenizerBase | None, part: Part) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or raise CalibrationError when there is none."""
    if tokenizer is None:
        raise CalibrationError(f"{part}: the model has no tokenizer; use token ids in a .npy file")
    return tokenizer
