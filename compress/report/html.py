"""report.html: the sections of the report in their order, as one self-contained page."""

from __future__ import annotations

from compress.report.names import short_name
from compress.report.page.render import Part, page
from compress.report.schema import Report
from compress.report.sections import SECTIONS

FILE = "report.html"


def html(report: Report) -> str:
    """The report as an HTML page; every figure in it comes from report.json. The first section has no heading."""
    ordered = sorted(SECTIONS.items(), key=lambda item: item[1].order)
    drawn = [(key, kind.title, kind().blocks(report)) for key, kind in ordered]
    parts = [Part(key, title, blocks) for key, title, blocks in drawn if blocks]
    first, *others = parts
    title = f"{short_name(report.model.source)}, compressed"
    return page(title, _subtitle(report), [Part(first.key, "", first.blocks), *others])


def _subtitle(report: Report) -> str:
    """The source of the model, the passes and the format."""
    recipe, source = report.reproduce.recipe, report.model.source
    steps = [key for step in recipe.get("passes", ()) for key in step]
    chain = " → ".join([*steps, recipe["save"]["format"]] if "save" in recipe else steps)
    return chain if short_name(source) == source else f"{source}: {chain}"
