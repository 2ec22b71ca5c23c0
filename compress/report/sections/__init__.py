"""The sections of report.md and report.html, one file each; the class of NAME.py is called like it, with `Section`."""

from __future__ import annotations

from compress.passes.contract.discovery import classes_by_file
from compress.report.sections.base import Section

SECTIONS: dict[str, type[Section]] = classes_by_file(__name__, __path__, Section, suffix="Section")
"""The class of every section by the name of its file."""
