"""Encoders without a head: embeddings of tokens and of sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compress.models.kinds.headless import Headless
from compress.models.terms import Compared


@dataclass(frozen=True)
class SentenceEncoder(Headless):
    """Models whose last hidden states are embeddings."""

    name: ClassVar[str] = "is an encoder"
    auto: ClassVar[str] = "AutoModel"
    task: ClassVar[str] = "feature-extraction"
    compared: ClassVar[Compared] = "embeddings"
