"""Sensitivities as heat maps: in a report, as a page and as an image for a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from compress.checkpoint.containers.files import check_output_file, user_path, write_text
from compress.recipe.sensitivities import Sensitivities
from compress.report.charts import HeatMap, Picture
from compress.report.charts import picture as picture_of
from compress.report.depth import heat_map
from compress.report.names import short_name
from compress.report.page.blocks import PageBlock, Prose, TextTable
from compress.report.page.numbers import number, with_error
from compress.report.page.render import PageSection, page

SUFFIXES = ".json", ".html"
"""The endings of the files that `MeasuredSensitivities.save` writes."""
SHOWN = 20  # rows of the table; the JSON file has all


class MeasuredSensitivities(Sensitivities):
    """The sensitivities of a model, which also draws and writes them."""

    def picture(self) -> Picture:
        """Draw the heat maps of all choices as one image: kinds of layers by block."""
        return picture_of(list(_heat_maps(self)))

    def html(self) -> str:
        """Render a page with the heat maps and the most sensitive layers."""
        title = f"The most sensitive {self.level}s"
        parts = [PageSection("maps", "", maps(self)), PageSection("worst", title, [most_sensitive(self)])]
        return page(f"Sensitivity of {short_name(self.model)}", "compress sensitivity", parts)

    def save(self, path: str | Path) -> None:
        """Write the values to a .json file, which a recipe reads by the item `sensitivity`, or the page to .html.

        Raises:
            OutputError: for another ending, and a file that cannot be written.
        """
        path = user_path(path)
        check_output_file(path, SUFFIXES)
        write_text(path, self.html() if path.suffix == ".html" else self.model_dump_json(indent=1) + "\n")


def maps(measured: Sensitivities) -> list[PageBlock]:
    """Describe the measurement, and draw a heat map for each choice."""
    text = (
        f"KL divergence from the model when one {measured.level} alone is changed, in nats per token, on "
        f"{measured.windows} windows of {measured.length} tokens of {measured.text}. Layers interact: this says where "
        "to spend bits, not what the result will be."
    )
    return [Prose(text), *_heat_maps(measured)]


def most_sensitive(measured: Sensitivities, count: int = SHOWN) -> TextTable:
    """List the layers with the largest divergences."""
    rows = [
        (
            row.name,
            row.choice,
            number(row.bits),
            with_error(row.kl, row.kl_stderr),
            with_error(row.loss, row.loss_stderr, "+"),
        )
        for row in sorted(measured.found, key=lambda row: -row.kl)[:count]
    ]
    return TextTable((measured.level, "choice", "bits", "KL", "loss"), rows, frozenset({1}))


def _heat_maps(measured: Sensitivities) -> Iterator[HeatMap]:
    for choice in measured.choices:
        values = [(row.name, row.kl) for row in measured.found if row.choice == choice]
        title = f"{choice}: {number(sum(kl for _, kl in values))} nats over all {measured.level}s"
        chart = heat_map(title, values, "KL divergence, nats per token", is_log=True)
        if chart is not None:
            yield chart
