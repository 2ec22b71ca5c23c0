"""Section: greedy answers to fixed prompts before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Details, PageBlock, Pair, TextTable
from compress.report.sections.base import Section
from compress.results.measurements.generation import GenerationResult
from compress.results.result import RunResult

HEAD = ("", "before", "after")


class AnswersSection(Section):
    """How many answers end and repeat themselves, and all answers; report.md has the figures in its first table."""

    title: ClassVar[str] = "Answers"
    order: ClassVar[int] = 16

    def render(self, result: RunResult) -> str | None:
        return None

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        answers: GenerationResult | None = result.evaluations.get("generation")
        if answers is None:
            return []
        rows = [
            ("answers that end", *(f"{share:.0%}" for share in answers.ended)),
            ("repeated 4-grams", *(f"{share:.1%}" for share in answers.repetition)),
            ("equal tokens before they differ", f"{answers.longest}", f"{answers.agreement:.1f}"),
            ("equal answers", "100%", f"{answers.same:.0%}"),
        ]
        pairs = [
            Details(
                base.prompt + (" (equal)" if base.text == compressed.text else ""),
                [Pair(("before", "after"), (base.text, compressed.text))],
            )
            for base, compressed in zip(answers.base, answers.compressed, strict=True)
        ]
        return [TextTable(HEAD, rows), Details(f"All {answers.prompts} answers", pairs)]
