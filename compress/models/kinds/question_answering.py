"""Models for extractive question answering: the start and the end of a span."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compress.models.kinds.headless import Headless
from compress.models.terms import Compared


@dataclass(frozen=True)
class QuestionAnswering(Headless):
    """Models with two distributions over the positions of a text."""

    name: ClassVar[str] = "is a question answering model"
    auto: ClassVar[str] = "AutoModelForQuestionAnswering"
    task: ClassVar[str] = "question-answering"
    compared: ClassVar[Compared] = "spans"
