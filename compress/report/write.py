"""Read and write a report: report.json, report.md, report.html and, if a pass trained, its curves."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from compress.checkpoint.containers.files import write_json, write_text
from compress.checkpoint.sources.untrusted import check_complete
from compress.errors import UserError
from compress.recipe.sensitivities import FILE as SENSITIVITY
from compress.recipe.sensitivities import Sensitivities, read_sensitivities
from compress.report.charts import picture
from compress.report.curves import CURVES, training_charts
from compress.report.render import html, markdown
from compress.results.result import Reproduction, RunResult

FILE, MARKDOWN, PAGE = "report.json", "report.md", "report.html"


class ReportError(UserError):
    """A folder has no report, or its report cannot be used."""


def read_report(folder: Path) -> RunResult:
    """Read the result of a run from its folder.

    Raises:
        ReportError: if there is no readable report.json.
        ModelError: if the run is not finished.
    """
    path = folder / FILE
    check_complete(folder)
    try:
        return RunResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ReportError(f"{path}: no readable report ({reason}); name the output folder of compress run") from error


def reproduction_of(folder: Path) -> Reproduction | None:
    """Read what determined the bytes of a checkpoint from the report in its folder; None if it has none.

    Raises:
        ReportError: for a report that cannot be read.
    """
    return read_report(folder).reproduce if (folder / FILE).exists() else None


def sensitivity_of(folder: Path, fingerprint: str) -> Sensitivities | None:
    """Read the sensitivities of the base model from a run's folder.

    Args:
        folder: The folder of the run.
        fingerprint: Digest of the base model.

    Returns:
        None if there are none.

    Raises:
        ReportError: for the file of another model.
        RecipeError: for a file without sensitivities.
    """
    path = folder / SENSITIVITY
    if not path.exists():
        return None
    measured = read_sensitivities(path)
    if measured.fingerprint != fingerprint:
        raise ReportError(
            f"{path}: measured on {measured.model}, which is another model; measure this one, or remove it"
        )
    return measured


def write_report(result: RunResult, folder: Path, into: Path | None = None) -> list[str]:
    """Write report.json, report.md, report.html and training.svg atomically.

    The sensitivities in `folder`, if there are any, become part of the report.

    Args:
        result: The measurements of a run.
        folder: Folder of the run.
        into: Another folder for the files.

    Returns:
        The names of the files.

    Raises:
        ReportError: as `sensitivity_of`.
        RecipeError: as `sensitivity_of`.
    """
    if (measured := sensitivity_of(folder, result.model.fingerprint)) is not None:
        result = result.model_copy(update={"sensitivity": measured})
    texts = {MARKDOWN: markdown(result), PAGE: html(result)}
    if charts := training_charts(result):
        texts[CURVES] = str(picture(charts, columns=2))
    destination = folder if into is None else into
    write_json(destination / FILE, result.to_json())
    for name, text in texts.items():
        write_text(destination / name, text)
    return [FILE, *texts]
