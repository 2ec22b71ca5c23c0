"""Whether two models speak of the same tokens in the same way, which a teacher and its student must."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from compress.errors import ModelError
from compress.model.objective import is_masked
from compress.model.open.opening import OpenModel, class_of, folder_of, read_config, read_tokenizer


def check_teacher(source: str, student: OpenModel, trust_remote_code: bool) -> None:
    """Raise ModelError, with the first difference, unless the model at `source` has the student's vocabulary and
    predicts what it does.

    Only its config and its tokenizer are read.
    """
    folder = folder_of(source)
    config = read_config(folder, source, trust_remote_code)
    check_kind(source, class_of(config, trust_remote_code), config, student)
    theirs, ours = (getattr(known, "vocab_size", None) for known in (config, student.config))
    if theirs != ours:
        raise ModelError(f"teacher: {source} knows {theirs} tokens, the model {ours}; both need one vocabulary")
    record = first_difference(read_tokenizer(folder, trust_remote_code), student.tokenizer)
    if record is not None:
        raise ModelError(
            f"teacher: {source} and the model have different tokenizers: {record}; both need one vocabulary"
        )


def check_kind(source: str, kind: type, config: PretrainedConfig, student: OpenModel) -> None:
    """Raise ModelError where one of two models predicts masked tokens, and the other next ones."""
    theirs, ours = is_masked(kind, config), is_masked(type(student.model), student.config)
    if theirs != ours:
        names = {True: "masked tokens", False: "next tokens"}
        raise ModelError(f"teacher: {source} predicts {names[theirs]}, the model {names[ours]}; both need one kind")


def first_difference(theirs: Any, ours: Any) -> str | None:
    """The lowest token id that two tokenizers have different texts for, in words; None: none, or one is missing."""
    if theirs is None or ours is None:
        return None
    there, here = ({i: text for text, i in tokenizer.get_vocab().items()} for tokenizer in (theirs, ours))
    for i in sorted(there.keys() | here.keys()):
        if there.get(i) != here.get(i):
            return f"token {i} is {there.get(i)!r} there and {here.get(i)!r} here"
    return None
