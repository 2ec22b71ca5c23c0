"""Section: the agreement of embeddings, classes, spans or scores with the base model on each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Heading, PageBlock, Prose, TextTable
from compress.report.sections.base import Section
from compress.results.measurements.agreement import MEASURE_WORDS, TextAgreement
from compress.results.result import RunResult

HEAD = ("", "if equal", "compressed")
NOTE = (
    "The model has no language-model head, so it has no perplexity. Its answers to windows of text are compared with "
    "those of the base model. Errors are standard errors over windows; rank agreement is Spearman's correlation."
)


class AgreementSection(Section):
    """A table of the measures on each text; report.md has them in the table of size and quality."""

    title: ClassVar[str] = "Agreement with the base model"
    order: ClassVar[int] = 13

    def render(self, result: RunResult) -> str | None:
        return None

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        blocks: list[PageBlock] = [Prose(NOTE)] if result.agreements else []
        for text in result.agreements:
            title = f"{text.text}, {text.windows} windows of {text.length} tokens"
            blocks += [Heading(title), TextTable(HEAD, rows(text))]
        return blocks


def rows(text: TextAgreement) -> list[tuple[str, ...]]:
    """List rows of `HEAD`."""
    measures = [(MEASURE_WORDS[name], measure) for name, measure in text.measures.items()]
    return [(words.name, words.perfect, words.value_text(measure)) for words, measure in measures]
