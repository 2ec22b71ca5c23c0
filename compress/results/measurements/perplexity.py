"""Loss, perplexity and divergence from the base model on texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from compress.models.terms import NEXT_TOKENS
from compress.results.measurements.base import Measurement, Record, SummaryRow, plus_minus


class Score(Record):
    """Loss and perplexity of one model on one text.

    Attributes:
        loss: Mean loss in nats over the targets of all windows.
        tokens: Number of targets.
        seconds: Wall time.
        of: ModelKind of the targets: 'next tokens' or 'masked tokens', whose perplexities cannot be compared.
        perplexity: exp(loss); infinity if that overflows.
        stderr: Standard error of the loss, with windows as the units of sampling.
        bits_per_byte: Of the text in UTF-8; None for masked tokens and without a tokenizer.
        bits_stderr: Its standard error.
        by_window: Mean loss of each window.
    """

    loss: float
    tokens: int
    seconds: float
    of: str
    perplexity: float
    stderr: float | None = None
    bits_per_byte: float | None = None
    bits_stderr: float | None = None
    by_window: list[float] = []


class Difference(Record):
    """The mean over windows of the difference of two models' losses, compressed minus base, and its standard error."""

    loss: float
    stderr: float | None


class AtPositions(Record):
    """Means over the targets at positions `first` to `last` of their windows."""

    first: int
    last: int
    kl: float
    agreement: float


class Divergence(Record):
    """The divergence of a variant from its base on one text, in nats per target.

    Attributes:
        mean: Mean over all targets.
        stderr: Its standard error, with windows as the units of sampling.
        median: Median over all targets.
        p99: 99% quantile over all targets.
        agreement: Fraction of targets where both models have the same most likely token.
        agreement_stderr: Its standard error.
        top_k: Number of most likely tokens that were stored of the base.
        by_position: Means by position.
    """

    mean: float
    stderr: float | None
    median: float
    p99: float
    agreement: float
    agreement_stderr: float | None
    top_k: int
    by_position: list[AtPositions]


class TextQuality(Record):
    """The scores of a model and its base on one text of [windows, length] token ids.

    Attributes:
        text: Its name.
        windows: Number of windows.
        length: Tokens of a window; of recordings, of the longest transcript.
        sha256: Of the token ids.
        stride: See `WindowTask`.
        chunk: See `WindowTask`.
        base: Score of the base model; None if the model is not compared.
        compressed: Score of the measured model.
        difference: Paired by window.
        divergence: Of the measured model from the base.
        overlap: Share of its tokens that the calibration of the model has read; None if that is unknown.
    """

    text: str
    windows: int
    length: int
    sha256: str
    stride: int | None = None
    chunk: int | None = None
    base: Score | None = None
    compressed: Score
    difference: Difference | None = None
    divergence: Divergence | None = None
    overlap: float | None = None


class PerplexityMeasurement(Measurement):
    """The loss of both models on each text, and the divergence of the compressed model from the base."""

    value_type: ClassVar[Any] = list[TextQuality]

    @classmethod
    def summary(cls, value: Sequence[TextQuality]) -> list[SummaryRow]:
        rows = []
        for text in value:
            base, compressed, of = text.base, text.compressed, text.compressed.of
            kind = "perplexity" if of == NEXT_TOKENS else f"perplexity of {of}"
            shape = f"{text.windows} x {text.length} tokens" + (f", {text.chunk} at a time" if text.chunk else "")
            name = f"{kind}, {text.text} ({shape})"
            if base is None:
                rows.append((name, "", f"{compressed.perplexity:.2f}", ""))
                continue
            increase = f"{compressed.perplexity / base.perplexity - 1:+.1%}"
            rows.append((name, f"{base.perplexity:.2f}", f"{compressed.perplexity:.2f}", increase))
            if text.difference is not None:
                change = plus_minus(text.difference.loss, text.difference.stderr, "+.4f")
                rows.append((f"loss, {text.text}", f"{base.loss:.4f}", f"{compressed.loss:.4f}", change))
            if text.divergence is not None:
                kl = plus_minus(text.divergence.mean, text.divergence.stderr, ".4f")
                rows.append((f"KL from the base, {text.text}", "0", kl, f"{text.divergence.agreement:.1%} equal"))
        return rows
