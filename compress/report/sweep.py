"""The result of a sweep: a row for each run, and a Pareto plot for each base model and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from compress.errors import Failure, QualityError
from compress.recipe.axes import labels
from compress.recipe.tables import ResultTable, Shown, megabytes
from compress.report.charts import Picture, ScatterChart
from compress.report.charts import picture as picture_of
from compress.report.page.blocks import Items, PageBlock, Prose, TextTable
from compress.report.page.render import PageSection, page
from compress.report.pareto import HEAD, LOSS, Variant, Variants
from compress.results.measurements.base import Record

State = Literal["complete", "failed", "unfinished"]
Value = str | int | float | bool | list[Any] | dict[str, Any] | None


class SweptRun(Record):
    """A run of a sweep.

    Attributes:
        name: The combination, and its folder inside of the folder of the sweep.
        values: The value by the key of its axis.
        model: Its base model.
        state: 'unfinished': the sweep was interrupted before the end of the run.
        error: Why it failed, or which limit of quality its complete checkpoint exceeds, in one line.
        seconds: Wall time of the process that completed it; None if that is unknown.
        size_bytes: Bytes of the weight files of its checkpoint.
        variant: Its measurements; None if it was not compared with its base model on a text.
        identity: Digest of its recipe, code and model, by which a complete run is known.
    """

    name: str
    values: dict[str, Value]
    model: str
    state: State = "unfinished"
    error: str | None = None
    seconds: float | None = None
    size_bytes: int | None = None
    variant: Variant | None = None
    identity: str = ""

    @property
    def text(self) -> str:
        """Its end in words."""
        if self.state != "complete":
            return f"{self.state}: {self.error}" if self.error else self.state
        measured = "" if self.size_bytes is None else f"{megabytes(self.size_bytes)} MB"
        if self.variant is not None:
            *_, loss = self.variant.cells(False)[:3]
            measured = f"{self.variant.smaller:.2f}x smaller, {self.variant.measure} {loss}"
        return f"complete: {measured}" + (f"; {self.error}" if self.error else "")


class SweepResult(Shown, BaseModel):
    """The result of a sweep: the content of sweep.json.

    Attributes:
        compress: Version of this package.
        recipe: Name of the recipe.
        over: The values of each axis by key.
        runs: One for each combination, in their order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compress: str
    recipe: str
    over: dict[str, list[Value]]
    runs: list[SweptRun]

    def check(self) -> None:
        """Raise an error if a run failed, or is below its limits of quality.

        Raises:
            Failure: naming the runs that failed.
            QualityError: naming those below their limits, if all are complete.
        """
        if self.failed:
            names = ", ".join(run.name for run in self.failed)
            raise Failure(
                f"{len(self.failed)} of {len(self.runs)} runs failed: {names}; the same call tries them again"
            )
        if limited := [run for run in self.runs if run.error is not None]:
            names = ", ".join(run.name for run in limited)
            raise QualityError(f"{len(limited)} of {len(self.runs)} runs exceed a limit of fail_if: {names}")

    @property
    def failed(self) -> list[SweptRun]:
        """The runs that failed."""
        return [run for run in self.runs if run.state == "failed"]

    @property
    def groups(self) -> list[Variants]:
        """The variants that can be compared: those with the same base model, text and measure."""
        groups: dict[tuple[object, ...], list[Variant]] = {}
        for run in self.runs:
            if run.variant is not None:
                groups.setdefault((run.model, *run.variant.basis), []).append(run.variant)
        return [Variants(models) for models in groups.values()]

    def table(self) -> ResultTable:
        """Return a row for each run."""
        on_front = {
            variant.source: is_on_front
            for group in self.groups
            for variant, is_on_front in zip(group.models, group.on_front(), strict=True)
        }
        measures = {run.variant.measure for run in self.runs if run.variant is not None}
        measured = tuple((measures.pop() if len(measures) == 1 else LOSS) if n == LOSS else n for n in HEAD[1:])
        head = (*labels(list(self.over)), *measured, "min", "state")
        rows = [self._row(run, on_front) for run in self.runs]
        texts = dict.fromkeys(group.models[0].text for group in self.groups)
        return ResultTable("; ".join(texts), head, rows).without_empty_columns()

    def _row(self, run: SweptRun, on_front: dict[str, bool]) -> tuple[str, ...]:
        values = tuple(str(value) for value in run.values.values())
        if run.variant is not None:
            cells = run.variant.cells(on_front[run.variant.source])
        else:
            size = "" if run.size_bytes is None else megabytes(run.size_bytes)
            cells = (size, *("" for _ in HEAD[2:]))
        minutes = "" if run.seconds is None else f"{run.seconds / 60:.1f}"
        state = "" if run.state == "complete" else run.state
        return (*values, *cells, minutes, ": ".join(filter(None, (state, run.error))))

    def tables(self) -> list[ResultTable]:
        """Return `table`."""
        return [self.table()]

    def charts(self) -> list[ScatterChart]:
        """Return the loss over the size, one chart for each base model and text; none if nothing was measured."""
        several = len(self.groups) > 1
        models = {run.variant.source: run.model for run in self.runs if run.variant is not None}
        return [
            group.chart(
                f"{models[group.models[0].source]}: {group.models[0].text}" if several else group.models[0].text
            )
            for group in self.groups
        ]

    def picture(self) -> Picture:
        """Draw the charts as an image. At least one run must have been measured."""
        return picture_of(self.charts())

    def html(self) -> str:
        """Render the sweep as a page: the charts, the table and the errors."""
        table = self.table()
        bars = "Bars are one standard error; the line joins the Pareto front."
        charts: Sequence[PageBlock] = self.charts()
        parts = [PageSection("plot", "", [Prose(f"{self._summary()} {bars}"), *charts])] if charts else []
        parts.append(
            PageSection("table", "Runs", [TextTable(table.head, table.rows, frozenset({len(table.head) - 1}))])
        )
        ends = [f"{run.name}: {run.text}" for run in self.runs]
        parts.append(PageSection("ends", "Each run", [Items(ends)]))
        return page(f"{len(self.runs)} runs of {self.recipe}", "compress sweep", parts)

    def _summary(self) -> str:
        counts = {state: sum(run.state == state for run in self.runs) for state in ("complete", "failed", "unfinished")}
        return "Runs: " + ", ".join(f"{count} {state}" for state, count in counts.items() if count) + "."
