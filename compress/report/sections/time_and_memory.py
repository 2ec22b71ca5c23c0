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
OF_DEVICE = "peak memory of the accelerator, MB"


class TimeAndMemory(Section):
    """A table with the rows of `rows`; the memory of an accelerator is a column only where one was used."""

    title: ClassVar[str] = "Time and memory"
    order: ClassVar[int] = 20

    def render(self, report: Report) -> str:
        shown = table((*HEAD, OF_DEVICE) if on_device(report) else HEAD, rows(report))
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
        if on_device(report):
            most = max(cost.device_bytes for cost in costs.values())
            bars = [Bar(name, c.device_bytes / most, data_size(c.device_bytes)) for name, c in costs.items()]
            groups.append(BarGroup("Peak memory of the accelerator", f"{data_size(most)} at most", bars))
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


def on_device(report: Report) -> bool:
    """Whether the run used an accelerator."""
    return any(cost.device_bytes for cost in report.costs.values())


def rows(report: Report) -> list[tuple[str, ...]]:
    """Rows (phase, seconds, MB), and the MB of the accelerator where one was used."""
    found = [(name, f"{cost.seconds:.1f}", f"{cost.peak_bytes / MB:.0f}") for name, cost in report.costs.items()]
    if not on_device(report):
        return found
    return [(*row, f"{c.device_bytes / MB:.0f}") for row, c in zip(found, report.costs.values(), strict=True)]
