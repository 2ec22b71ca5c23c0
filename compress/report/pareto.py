"""Compare variants of one model: a table, and a chart of size against loss as an image or in a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.recipe.tables import ResultTable, Shown, megabytes
from compress.report.charts import Picture, Point, ScatterChart
from compress.report.charts import picture as picture_of
from compress.report.page.blocks import Items, Prose, TextTable
from compress.report.page.numbers import upper_first
from compress.report.page.render import PageSection, page
from compress.report.verdict import of_loss, overlap_warnings
from compress.report.write import FILE, ReportError, read_report
from compress.results.comparison import Comparison
from compress.results.measurements.base import Record, plus_minus
from compress.results.result import Measurements

HEAD = ("model", "MB", "smaller", "loss - base", "KL", "top-1", "tasks, mean difference", "front")
MB = 1e6
LOSS = "loss - base"


class Variant(Record):
    """One model of a comparison.

    Attributes:
        source: Its folder, hub id or file.
        size_bytes: Bytes of its weight files.
        base_bytes: Bytes of the base model.
        text: Name and digest of the text, which must be equal for all variants.
        loss: Paired difference from the base in nats per token, or what `measure` says.
        loss_stderr: Its standard error.
        measure: What `loss` is; of models without a language-model head, the distance from two equal models.
        kl: KL divergence from the base, nats per token.
        kl_stderr: Its standard error.
        agreement: Fraction of positions with the most likely token of the base.
        tasks: Mean over tasks of the accuracy difference.
        verdict: What the measurements on the text show.
    """

    source: str
    size_bytes: int
    base_bytes: int
    text: str
    loss: float
    loss_stderr: float | None = None
    measure: str = LOSS
    kl: float | None = None
    kl_stderr: float | None = None
    agreement: float | None = None
    tasks: float | None = None
    verdict: str | None = None

    @property
    def smaller(self) -> float:
        """The size of the base model relative to this variant."""
        return self.base_bytes / self.size_bytes

    @property
    def basis(self) -> tuple[str, int, str]:
        """What variants must share to be compared: the text, the size of the base model, and the measure."""
        return self.text, self.base_bytes, self.measure

    def cells(self, on_front: bool) -> tuple[str, ...]:
        """Return the cells below `HEAD`, without the first."""
        return (
            megabytes(self.size_bytes),
            f"{self.smaller:.2f}x",
            plus_minus(self.loss, self.loss_stderr, "+.4f"),
            "" if self.kl is None else plus_minus(self.kl, self.kl_stderr, ".4f"),
            "" if self.agreement is None else f"{self.agreement:.1%}",
            "" if self.tasks is None else f"{self.tasks:+.4f}",
            "yes" if on_front else "",
        )


def variant_of(source: str, size_bytes: int, base_bytes: int, measured: Measurements) -> Variant | None:
    """Summarize a model on its first text.

    Args:
        source: Folder, hub id or file of the model.
        size_bytes: Bytes of its weights.
        base_bytes: Bytes of the base model's weights.
        measured: Its measurements.

    Returns:
        None if the model was not compared with a base on a text.
    """
    sizes = {"source": source, "size_bytes": size_bytes, "base_bytes": base_bytes}
    if measured.agreements:
        text = measured.agreements[0]
        (words, measure), kl = text.main, text.measures.get("kl")
        return Variant(
            **sizes,
            text=_described(text.text, text.windows, text.length, text.sha256),
            loss=words.exact - measure.value,
            loss_stderr=measure.stderr,
            measure=words.lost,
            kl=None if kl is None else kl.value,
            kl_stderr=None if kl is None else kl.stderr,
        )
    text = next(iter(measured.texts), None)
    if text is None or text.difference is None:
        return None
    difference, divergence = text.difference, text.divergence
    return Variant(
        **sizes,
        text=_described(text.text, text.windows, text.length, text.sha256),
        loss=difference.loss,
        loss_stderr=difference.stderr,
        kl=None if divergence is None else divergence.mean,
        kl_stderr=None if divergence is None else divergence.stderr,
        agreement=None if divergence is None else divergence.agreement,
        tasks=_mean_of_tasks(measured.evaluations.get("tasks")),
        verdict="; ".join([of_loss(text, difference), *overlap_warnings(measured)[:1]]),
    )


def _described(text: str, windows: int, length: int, sha256: str) -> str:
    return f"{text}, {windows} x {length} tokens, sha256 {sha256[:12]}"


def _mean_of_tasks(result: object) -> float | None:
    """The mean accuracy difference over the tasks; of each task, its first metric that is right or wrong."""
    difference_by_task: dict[str, float] = {}
    for row in getattr(result, "scores", ()):
        if row.paired is not None and row.paired.p is not None:
            difference_by_task.setdefault(row.task, row.paired.difference)
    return sum(difference_by_task.values()) / len(difference_by_task) if difference_by_task else None


def from_report(folder: Path) -> Variant:
    """Read the variant that a run wrote.

    Raises:
        ReportError: if there is no report, or no comparison in it.
    """
    result = read_report(folder)
    variant = variant_of(str(folder), result.size.checkpoint_bytes, result.size.dense_bytes, result)
    if variant is None:
        raise ReportError(f"{folder / FILE}: has no paired loss on a text; run compress compare --measure")
    return variant


@dataclass(frozen=True, repr=False)
class Variants(Shown):
    """Variants of one model.

    Attributes:
        models: Every variant, measured on the same text.
        comparison: The measurements, if the variants were not read from reports.
    """

    models: Sequence[Variant]
    comparison: Comparison | None = None

    @classmethod
    def from_reports(cls, folders: Sequence[Path]) -> Variants:
        """Read the variants of some runs.

        Raises:
            ReportError: if they were measured on different texts or models.
        """
        models = [from_report(folder) for folder in folders]
        for variant in models[1:]:
            for name in ("text", "base_bytes", "measure"):
                if getattr(variant, name) != getattr(models[0], name):
                    raise ReportError(
                        f"{variant.source}: its {name.replace('_', ' ')} is {getattr(variant, name)}, but that of "
                        f"{models[0].source} is {getattr(models[0], name)}; run compress compare --measure --base MODEL"
                    )
        return cls(models)

    @classmethod
    def from_comparison(cls, comparison: Comparison) -> Variants:
        """Collect the variants of an evaluation; its base is not among them.

        Raises:
            ReportError: if a model was not compared on a text.
        """
        size_by_source = {model.source: model.size_bytes for model in comparison.models}
        models = []
        for model in comparison.models:
            if model.source != comparison.base:
                base_bytes = size_by_source.get(comparison.base or "", 0)
                variant = variant_of(model.source, model.size_bytes, base_bytes, model)
                if variant is None:
                    raise ReportError(f"{model.source}: was not compared with a base on a text; give a base and a text")
                models.append(variant)
        return cls(models, comparison)

    def on_front(self) -> list[bool]:
        """Say of each variant whether none is as small with less loss, or smaller with as little loss."""

        def dominates(a: Variant, b: Variant) -> bool:
            no_worse = a.size_bytes <= b.size_bytes and a.loss <= b.loss
            return no_worse and (a.size_bytes < b.size_bytes or a.loss < b.loss)

        return [not any(dominates(rival, variant) for rival in self.models) for variant in self.models]

    def table(self) -> ResultTable:
        """Return a row for each variant, from the largest to the smallest."""
        on_front = dict(zip((variant.source for variant in self.models), self.on_front(), strict=True))
        rows = [
            (variant.source, *variant.cells(on_front[variant.source]))
            for variant in sorted(self.models, key=lambda variant: -variant.size_bytes)
        ]
        head = tuple(self.models[0].measure if name == LOSS else name for name in HEAD)
        return ResultTable(self.models[0].text, head, rows).without_empty_columns()

    def tables(self) -> list[ResultTable]:
        """Return `table`."""
        return [self.table()]

    def verdicts(self) -> list[str]:
        """Return a sentence for each variant: its size, and what the measurements of its quality show."""
        return [f"{variant.source}: {verdict(variant)}" for variant in self.models]

    def picture(self) -> Picture:
        """Draw the comparison as an image."""
        return picture_of([self.chart(f"Measured on {self.models[0].text}")])

    def html(self) -> str:
        """Render the comparison as a page: the chart, the verdicts and the table."""
        text = f"Measured on {self.models[0].text}. Bars are one standard error; the line joins the Pareto front."
        table = self.table()
        parts = [
            PageSection("plot", "", [Prose(text), self.chart("Size and quality")]),
            PageSection("verdicts", "Verdicts", [Items(self.verdicts())]),
            PageSection("table", "Variants", [TextTable(table.head, table.rows)]),
        ]
        return page(f"{len(self.models)} variants of one model", "compress compare", parts)

    def chart(self, title: str) -> ScatterChart:
        """Draw the loss of each variant over its size, with standard errors; a line joins the Pareto front."""
        points = [
            Point(
                name=Path(variant.source).name,
                x=variant.size_bytes / MB,
                y=variant.loss,
                error=variant.loss_stderr or 0.0,
                text=f"{variant.source}: {verdict(variant)}",
                is_main=is_on_front,
            )
            for variant, is_on_front in zip(self.models, self.on_front(), strict=True)
        ]
        measure = self.models[0].measure
        y_name = "loss minus that of the base model, nats per token" if measure == LOSS else measure
        return ScatterChart(title, points, "size of the checkpoint, MB", upper_first(y_name))


def verdict(variant: Variant) -> str:
    """Describe a variant in words: its size, and what the measurements of its quality show."""
    distance = f"{variant.measure} {plus_minus(variant.loss, variant.loss_stderr, '.4f')}"
    return f"{variant.smaller:.2f}x smaller; {variant.verdict or distance}"
