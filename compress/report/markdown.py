"""report.md: the sections of the report in their order."""

from __future__ import annotations

from compress.report.schema import Report
from compress.report.sections import SECTIONS


def markdown(report: Report) -> str:
    """The report as Markdown; every figure in it comes from report.json."""
    parts = [f"# {report.model.source}, compressed"]
    for section in sorted(SECTIONS.values(), key=lambda kind: kind.order):
        body = section().render(report)
        if body is not None:
            parts.append(f"## {section.title}\n\n{body}")
    return "\n\n".join(parts) + "\n"
