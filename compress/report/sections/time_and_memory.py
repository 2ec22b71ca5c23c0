"""Section: time and peak memory of every phase of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic_core import to_jsonable_python

from compress.passes import PASSES
from compress.report.page.blocks import Bar, BarGroup, Bars, Block, Items, Step, Steps
from compress.report.page.numbers import data_size, duration
from compress.report.schema import Reading, Report
from compress.report.sections.base import MB, Section, table

HEAD = ("phase", "seconds", "peak memory, MB")


class TimeAndMemory(Section):
    """A table with the rows of `rows`."""

    title: ClassVar[str] = "Time and memory"
    order: ClassVar[int] = 20

    def render(self, report: Report) -> str:
        shown = table(HEAD, rows(report))
        return shown if report.reading is None else f"{shown}\n\n{reading(report.reading)}"

    def blocks(self, report: Report) -> Sequence[Block]:
        costs = report.costs
        longest = max((cost.seconds for cost in costs.values()), default=0) or 1.0
        largest = max((cost.peak_bytes for cost in costs.values()), default=0) or 1
        times = [Bar(name, cost.seconds / longest, duration(cost.seconds)) for name, cost in costs.items()]
        memory = [Bar(name, cost.peak_bytes / largest, data_size(cost.peak_bytes)) for name, cost in costs.items()]
        total = duration(sum(cost.seconds for cost in costs.values()))
        groups = [
            BarGroup("Time", f"{total} in all", times),
            BarGroup("Peak memory", f"{data_size(largest)} at most", memory),
        ]
        read = [] if report.reading is None else [Items([reading(report.reading)])]
        return [Steps(list(pipeline(report.reproduce.recipe))), Bars(groups), *read]


def pipeline(recipe: Mapping[str, Any]) -> Iterator[Step]:
    """The model, the passes with the options that are no defaults, and the format."""
    for entry in recipe.get("passes", ()):
        for key, options in entry.items():
            yield Step(key, [f"{name} {_plain(value)}" for name, value in options.items() if _chosen(key, name, value)])
    if "save" in recipe:
        yield Step("save", [recipe["save"]["format"]])


def _chosen(key: str, name: str, value: Any) -> bool:
    """Whether the value of an option is not its default; unknown passes have no defaults."""
    fields = {field.alias or name: field for name, field in PASSES[key].model_fields.items()} if key in PASSES else {}
    if name not in fields or fields[name].is_required():
        return True
    return to_jsonable_python(fields[name].get_default(call_default_factory=True)) != value


def _plain(value: Any) -> str:
    """A value of a recipe as text; booleans as YAML spells them."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def reading(found: Reading) -> str:
    """The time lost to the disk in words."""
    return f"reading: {found.seconds:.1f} s waiting for {found.size_bytes / MB:.0f} MB of weights"


def rows(report: Report) -> list[tuple[str, str, str]]:
    """Rows (phase, seconds, MB)."""
    return [(name, f"{cost.seconds:.1f}", f"{cost.peak_bytes / MB:.0f}") for name, cost in report.costs.items()]
