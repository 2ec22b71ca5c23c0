"""Greedy answers to fixed prompts."""

from __future__ import annotations

from typing import Any, ClassVar

from compress.results.measurements.base import Measurement, Record, SummaryRow


class GeneratedAnswer(Record):
    """A greedy answer.

    Attributes:
        prompt: The prompt.
        text: The answer.
        tokens: Number of its tokens.
        ended: Whether it ended by itself.
        repetition: Fraction of its 4-grams that occurred before.
    """

    prompt: str
    text: str
    tokens: int
    ended: bool
    repetition: float


class GenerationResult(Record):
    """Answers of both models to the same prompts.

    Attributes:
        prompts: Number of prompts.
        longest: Maximum number of tokens of an answer.
        agreement: Mean number of tokens before the answers differ.
        agreement_stderr: Its standard error.
        same: Fraction of prompts with equal answers.
        ended: Fraction of answers that ended, of the base and of the compressed model.
        repetition: Mean repetition, of the base and of the compressed model.
        base: Answers of the base model.
        compressed: Answers of the compressed model.
    """

    prompts: int
    longest: int
    agreement: float
    agreement_stderr: float | None
    same: float
    ended: tuple[float, float]
    repetition: tuple[float, float]
    base: list[GeneratedAnswer]
    compressed: list[GeneratedAnswer]


class GenerationMeasurement(Measurement):
    """The answers of both models to the same prompts."""

    value_type: ClassVar[Any] = GenerationResult

    @classmethod
    def summary(cls, value: GenerationResult) -> list[SummaryRow]:
        (base_ended, compressed_ended), (base_repetition, compressed_repetition) = value.ended, value.repetition
        agreed = f"{value.same:.0%} equal"
        return [
            ("answers: tokens before they differ", f"{value.longest}", f"{value.agreement:.1f}", agreed),
            (
                "answers that end",
                f"{base_ended:.0%}",
                f"{compressed_ended:.0%}",
                f"{compressed_ended - base_ended:+.0%}",
            ),
            (
                "repeated 4-grams",
                f"{base_repetition:.1%}",
                f"{compressed_repetition:.1%}",
                f"{compressed_repetition - base_repetition:+.1%}",
            ),
        ]
