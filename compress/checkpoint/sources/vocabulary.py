"""Check that a teacher and its student have the same vocabulary and the same objective.

Models of one tokenizer may have embeddings with more rows than it has tokens, and more in larger models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.checkpoint.opened import OpenModel
from compress.checkpoint.sources.files import read_tokenizer
from compress.checkpoint.sources.hub import folder_of
from compress.checkpoint.sources.skeleton import empty_model, read_config
from compress.checkpoint.sources.supported import check_supported
from compress.errors import ModelError, reported_as
from compress.models.kinds.contract import text_config
from compress.models.kinds.kinds import UNKNOWN, features_of, kind_of

EQUAL = {"classes": ("num_labels", "problem_type"), "embeddings": ("hidden_size",)}
"""The entries of the configurations that a teacher and its student share, by what is compared of them."""


def check_teacher(source: str, student: OpenModel, trust_remote_code: bool) -> PreTrainedModel:
    """Raise ModelError unless the model at `source` has the student's vocabulary and objective.

    The error names the first difference. Only the configuration and the tokenizer of the teacher are read; it is
    returned without weights.
    """
    with reported_as("teacher", "model"):
        folder = folder_of(source, weights=False)
        config = read_config(folder, source, trust_remote_code)
        teacher = empty_model(folder, config, student.dtype, trust_remote_code)
    check_supported(teacher, f"teacher: {source}")
    check_kind(source, teacher, student.model)
    teacher_size, student_size = (
        getattr(text_config(configuration), "vocab_size", None) for configuration in (config, student.config)
    )
    tokenizers = read_tokenizer(folder, trust_remote_code), student.tokenizer
    if teacher_size != student_size and not _is_padded(teacher_size, student_size, tokenizers):
        raise ModelError(
            f"teacher: {source} has a vocabulary of {teacher_size} tokens, the model of {student_size}; "
            "use a teacher with the model's vocabulary"
        )
    difference = first_difference(*tokenizers)
    if difference is not None:
        raise ModelError(
            f"teacher: {source} and the model have different tokenizers: {difference}; "
            "use a teacher with the model's vocabulary"
        )
    return teacher


def _is_padded(teacher_size: Any, student_size: Any, tokenizers: tuple[Any, Any]) -> bool:
    """Return whether a teacher's vocabulary has only more rows without tokens than the model's."""
    if None in (teacher_size, student_size, *tokenizers) or teacher_size < student_size:
        return False
    return max(max(tokenizer.get_vocab().values()) for tokenizer in tokenizers) < student_size


@contextmanager
def with_vocabulary_of(
    student: PretrainedConfig, opening: AbstractContextManager[PreTrainedModel]
) -> Iterator[PreTrainedModel]:
    """Open a teacher; cut its logits to the vocabulary of the student, which has all tokens (`check_teacher`).

    Args:
        student: its configuration.
        opening: opens the teacher.
    """
    size = getattr(text_config(student), "vocab_size", None)

    def cut(module: nn.Module, inputs: Any, output: Any) -> None:
        if getattr(output, "logits", None) is not None:
            output.logits = output.logits[..., :size]

    with opening as teacher:
        padded = size is not None and getattr(text_config(teacher.config), "vocab_size", size) > size
        handle = teacher.register_forward_hook(cut) if padded else None
        try:
            yield teacher
        finally:
            if handle is not None:
                handle.remove()


def check_kind(source: str, teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    """Raise ModelError when a teacher's outputs cannot be learned: it is of another kind, or has other answers."""
    kinds = kind_of(teacher), kind_of(student)
    if kinds[0] != kinds[1]:
        teacher_name, student_name = (UNKNOWN if kind is None else kind.name for kind in kinds)
        raise ModelError(
            f"teacher: {source} {teacher_name}, the model {student_name}; use a teacher of the model's kind"
        )
    features = [features_of(model) for model in (teacher, student)]
    if features[0] != features[1]:
        raise ModelError(
            f"teacher: {source} reads {features[0]}, the model {features[1]}; use a teacher that reads the same "
            "features"
        )
    for name in () if kinds[0] is None or kinds[0].learns else EQUAL.get(kinds[0].compared, ()):
        value, expected = (getattr(text_config(model.config), name, None) for model in (teacher, student))
        if value != expected:
            raise ModelError(
                f"teacher: {source} has {name} {value}, the model {expected}, so its outputs cannot be learned; use a "
                f"teacher with the model's {name}"
            )


def first_difference(teacher: Any, student: Any) -> str | None:
    """Describe the lowest token id whose text differs in two tokenizers; None when all agree or one is missing."""
    if teacher is None or student is None:
        return None
    teacher_texts, student_texts = (
        {i: text for text, i in tokenizer.get_vocab().items()} for tokenizer in (teacher, student)
    )
    for i in sorted(teacher_texts.keys() | student_texts.keys()):
        if teacher_texts.get(i) != student_texts.get(i):
            return f"token {i} is {teacher_texts.get(i)!r} in the teacher and {student_texts.get(i)!r} in the model"
    return None
