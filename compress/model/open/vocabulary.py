"""Check that a teacher and its student have the same vocabulary and the same objective."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import ModelError
from compress.model.objective import is_masked, text_config
from compress.model.open.opening import OpenModel, empty_model, folder_of, read_config
from compress.model.open.supported import check_language_model
from compress.model.open.tokenizer import read_tokenizer


def check_teacher(source: str, student: OpenModel, trust_remote_code: bool) -> PreTrainedModel:
    """Raise ModelError unless the model at `source` has the student's vocabulary and objective.

    The error names the first difference. Only the configuration and the tokenizer of the teacher are read; it is
    returned without weights.
    """
    folder = folder_of(source)
    config = read_config(folder, source, trust_remote_code)
    teacher = empty_model(folder, config, student.dtype, trust_remote_code)
    check_language_model(teacher, f"teacher: {source}")
    check_kind(source, type(teacher), config, student)
    teacher_size, student_size = (getattr(text_config(known), "vocab_size", None) for known in (config, student.config))
    if teacher_size != student_size:
        raise ModelError(
            f"teacher: {source} has a vocabulary of {teacher_size} tokens, the model of {student_size}; "
            "use a teacher with the model's vocabulary"
        )
    difference = first_difference(read_tokenizer(folder, trust_remote_code), student.tokenizer)
    if difference is not None:
        raise ModelError(
            f"teacher: {source} and the model have different tokenizers: {difference}; "
            "use a teacher with the model's vocabulary"
        )
    return teacher


def check_kind(source: str, kind: type, config: PretrainedConfig, student: OpenModel) -> None:
    """Raise ModelError when one of the two models predicts masked tokens and the other next tokens."""
    teacher, own = is_masked(kind, config), is_masked(type(student.model), student.config)
    if teacher != own:
        names = {True: "masked tokens", False: "next tokens"}
        raise ModelError(
            f"teacher: {source} predicts {names[teacher]}, the model {names[own]}; use a teacher of the model's kind"
        )


def first_difference(teacher: Any, student: Any) -> str | None:
    """Describe the lowest token id whose text differs in two tokenizers; None when all agree or one is missing."""
    if teacher is None or student is None:
        return None
    texts, own = ({i: text for text, i in tokenizer.get_vocab().items()} for tokenizer in (teacher, student))
    for i in sorted(texts.keys() | own.keys()):
        if texts.get(i) != own.get(i):
            return f"token {i} is {texts.get(i)!r} in the teacher and {own.get(i)!r} in the model"
    return None
