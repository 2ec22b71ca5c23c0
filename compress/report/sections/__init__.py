"""The sections of report.md, one file per section; each is found by its file name. Nothing is registered by hand."""

from __future__ import annotations

from compress.passes.contract.discovery import classes_by_file
from compress.report.sections.base import Section

SECTIONS: dict[str, type[Section]] = classes_by_file(__name__, __path__, Section)
"""The class of every section by the name of its file."""
