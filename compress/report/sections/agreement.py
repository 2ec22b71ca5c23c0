"""Section: the agreement of embeddings, classes, spans or scores with the base model on each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.evaluate.agreement import WORDS, TextAgreement
from compress.report.page.blocks import Block, Heading, Prose, Table
from compress.report.schema import Report
from compress.report.sections.base import Section
from compress.report.verdict import agreements

HEAD = ("", "if equal", "compressed")
NOTE = (
    "The model has no language-model head, so it has no perplexity. Its answers to windows of text are compared with "
    "those of the base model. Errors are standard errors over windows; rank agreement is Spearman's correlation."
)


class Agreement(Section):
    """A table of the measures on each text; report.md has them in the table of size and quality."""

    title: ClassVar[str] = "Agreement with the base model"
    order: ClassVar[int] = 13

    def render(self, report: Report) -> str | None:
        return None

    def blocks(self, report: Report) -> Sequence[Block]:
        texts = agreements(report)
        found: list[Block] = [Prose(NOTE)] if texts else []
        for text in texts:
            title = f"{text.text}, {text.windows} windows of {text.length} tokens"
            found += [Heading(title), Table(HEAD, rows(text))]
        return found


def rows(text: TextAgreement) -> list[tuple[str, ...]]:
    """Rows of `HEAD`."""
    return [(WORDS[name].name, WORDS[name].perfect, WORDS[name].shown(found)) for name, found in text.measures.items()]
