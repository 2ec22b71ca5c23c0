"""Agreement with the base model on texts, of models without a language-model head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.models.terms import Compared
from compress.results.measurements.base import Measurement, Record, SummaryRow


class Measure(Record):
    """A measure of agreement, and its standard error with windows as the units of sampling."""

    value: float
    stderr: float | None = None


class TextAgreement(Record):
    """The agreement of two models on one text of [windows, length] token ids.

    Attributes:
        text: Its name.
        windows: Number of windows.
        length: Tokens of a window.
        sha256: Of the token ids.
        compared: What is compared.
        measures: By the keys of `MEASURE_WORDS`, the most important first.
        overlap: As of `TextQuality`.
    """

    text: str
    windows: int
    length: int
    sha256: str
    compared: Compared
    measures: dict[str, Measure]
    overlap: float | None = None

    @property
    def main(self) -> tuple[MeasureWords, Measure]:
        """The most important measure and its words."""
        name, measure = next(iter(self.measures.items()))
        return MEASURE_WORDS[name], measure


@dataclass(frozen=True)
class MeasureWords:
    """Texts for a measure.

    Attributes:
        name: Its name in tables.
        sentence: A sentence with {} for the value.
        lost: Name of the distance from two equal models.
        exact: Value of two equal models.
        share: Whether it is shown in percent.
    """

    name: str
    sentence: str
    lost: str = ""
    exact: float = 1.0
    share: bool = False

    @property
    def perfect(self) -> str:
        """The value of two equal models as text."""
        return f"{self.exact:.0%}" if self.share else f"{self.exact:g}"

    def value_text(self, measure: Measure) -> str:
        """Format the value with its standard error, which has two significant digits if it is small."""
        form = ".1%" if self.share else f".{decimals(measure.stderr)}f"
        return f"{measure.value:{form}}" + ("" if measure.stderr is None else f" ± {measure.stderr:{form}}")


def decimals(stderr: float | None) -> int:
    """Return the number of decimals with which a standard error has two significant digits, from 4 to 7."""
    return 4 if not stderr else min(max(1 - math.floor(math.log10(stderr)), 4), 7)


MEASURE_WORDS = {
    "cosine": MeasureWords(
        "embeddings, cosine with the base model's", "the embeddings agree to {} (cosine)", "1 - cosine"
    ),
    "rank": MeasureWords(
        "similarities of pairs of texts, rank agreement", "the similarities of pairs of texts rank as before to {}"
    ),
    "same": MeasureWords(
        "same predicted class",
        "the predicted class is that of the base model in {} of the cases",
        "changed classes",
        share=True,
    ),
    "kl": MeasureWords("KL divergence of the probabilities, nats", "KL divergence {} nats", exact=0.0),
    "same_span": MeasureWords(
        "same answer span", "the answer span is that of the base model in {} of the texts", "changed spans", share=True
    ),
    "overlap": MeasureWords("overlap of the answer spans (F1)", "the answer spans overlap to {} (F1)", share=True),
    "score_rank": MeasureWords("scores, rank agreement", "the scores rank as before to {}", "1 - rank agreement"),
    "score_error": MeasureWords(
        "scores, difference relative to their spread", "the scores differ by {} of their spread", exact=0.0
    ),
}
"""The measures by key. Rank agreement is Spearman's correlation."""


class AgreementMeasurement(Measurement):
    """The agreement of both models on each text."""

    value_type: ClassVar[Any] = list[TextAgreement]

    @classmethod
    def summary(cls, value: Sequence[TextAgreement]) -> list[SummaryRow]:
        rows = []
        for text in value:
            shape = f"{text.text} ({text.windows} x {text.length} tokens)"
            for name, measure in text.measures.items():
                words = MEASURE_WORDS[name]
                rows.append((f"{words.name}, {shape}", words.perfect, words.value_text(measure), ""))
        return rows
