"""Write a report to disk: report.json, report.md and, where a pass trained, its curves."""

from __future__ import annotations

from pathlib import Path

from compress.formats.containers.files import write_json, write_text
from compress.report.curves import FILE, picture
from compress.report.markdown import markdown
from compress.report.schema import Report


def write_report(report: Report, folder: Path) -> None:
    """Write report.json, report.md and training.svg atomically."""
    write_json(folder / "report.json", report.to_json())
    if report.training:
        write_text(folder / FILE, picture({label: record.curve for label, record in report.training.items()}))
    write_text(folder / "report.md", markdown(report))
