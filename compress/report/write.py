"""Read and write a report: report.json, report.md, report.html and, where a pass trained, its curves."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from compress.checkpoint.containers.files import write_json, write_text
from compress.errors import UserError
from compress.recipe.sensitivities import FILE as SENSITIVITY
from compress.recipe.sensitivities import Sensitivities, read_sensitivities
from compress.report.curves import FILE as CURVES
from compress.report.curves import picture
from compress.report.html import FILE as PAGE
from compress.report.html import html
from compress.report.markdown import markdown
from compress.report.schema import Report

FILE, MARKDOWN = "report.json", "report.md"


class ReportError(UserError):
    """A folder has no report, or its report cannot be used."""


def read_report(folder: Path) -> Report:
    """The report of a run's folder. Raises ReportError."""
    path = folder / FILE
    try:
        return Report.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ReportError(f"{path}: no readable report ({reason}); name the output folder of compress run") from error


def sensitivity_of(folder: Path, fingerprint: str) -> Sensitivities | None:
    """The sensitivities of the base model in a run's folder, if there are any.

    fingerprint: of the base model. Raises ReportError for a file of another model, RecipeError for one that is none.
    """
    path = folder / SENSITIVITY
    if not path.exists():
        return None
    found = read_sensitivities(path)
    if found.fingerprint != fingerprint:
        raise ReportError(f"{path}: measured on {found.model}, which is another model; measure this one, or remove it")
    return found


def write_report(report: Report, folder: Path, into: Path | None = None) -> list[str]:
    """Write report.json, report.md, report.html and training.svg atomically; returns their names.

    into: another folder for the files. The sensitivities in `folder`, if any, become part of the report. Raises as
    `sensitivity_of` does.
    """
    if (measured := sensitivity_of(folder, report.model.fingerprint)) is not None:
        report = report.model_copy(update={"sensitivity": measured})
    texts = {MARKDOWN: markdown(report), PAGE: html(report)}
    if report.training:
        texts[CURVES] = picture({label: record.curve for label, record in report.training.items()})
    place = folder if into is None else into
    write_json(place / FILE, report.to_json())
    for name, text in texts.items():
        write_text(place / name, text)
    return [FILE, *texts]
