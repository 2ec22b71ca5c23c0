"""Section: time and peak memory of every phase of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from compress.passes import PASSES
from compress.recipe.pages import PassPage
from compress.recipe.tables import megabytes
from compress.report.names import formats_in
from compress.report.page.blocks import Bar, BarGroup, Bars, Items, PageBlock, Pipeline, PipelineStep
from compress.report.page.numbers import data_size, duration
from compress.report.sections.base import Section, table
from compress.results.result import DiskReading, RunResult

HEAD = ("phase", "seconds", "peak memory, MB")
OF_DEVICE = "peak memory of the accelerator, MB"


class TimeAndMemorySection(Section):
    """A table with the rows of `rows`; the memory of an accelerator is a column only where one was used."""

    title: ClassVar[str] = "Time and memory"
    order: ClassVar[int] = 20

    def render(self, result: RunResult) -> str:
        shown = table((*HEAD, OF_DEVICE) if on_device(result) else HEAD, rows(result))
        return shown if result.reading is None else f"{shown}\n\n{disk_time(result.reading)}"

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        costs = result.costs
        longest = max((cost.seconds for cost in costs.values()), default=0) or 1.0
        largest = max((cost.peak_bytes for cost in costs.values()), default=0) or 1
        times = [Bar(name, cost.seconds / longest, duration(cost.seconds)) for name, cost in costs.items()]
        memory = [Bar(name, cost.peak_bytes / largest, data_size(cost.peak_bytes)) for name, cost in costs.items()]
        total = duration(sum(cost.seconds for cost in costs.values()))
        groups = [
            BarGroup("Time", f"{total} in all", times),
            BarGroup("Peak memory", f"{data_size(largest)} at most", memory),
        ]
        if on_device(result):
            maximum = max(cost.device_bytes for cost in costs.values())
            bars = [Bar(name, c.device_bytes / maximum, data_size(c.device_bytes)) for name, c in costs.items()]
            groups.append(BarGroup("Peak memory of the accelerator", f"{data_size(maximum)} at most", bars))
        disk = [] if result.reading is None else [Items([disk_time(result.reading)])]
        return [Pipeline(list(pipeline(result.reproduce.recipe))), Bars(groups), *disk]


def pipeline(recipe: Mapping[str, Any]) -> Iterator[PipelineStep]:
    """Yield the passes with the options that are not defaults, and the format."""
    for entry in recipe.get("passes", ()):
        for key, options in entry.items():
            yield PipelineStep(
                key, [f"{name} {_plain(value)}" for name, value in options.items() if _chosen(key, name, value)]
            )
    if "save" in recipe:
        yield PipelineStep("save", list(formats_in(recipe)))


def _chosen(key: str, name: str, value: Any) -> bool:
    """Whether the value of an option is not its default; passes without a stored page have no defaults."""
    page = PassPage.stored(key) if key in PASSES else None
    defaults = {} if page is None else {option.name: option.default for option in page.options}
    default = defaults.get(name)
    return default is None or json.loads(default) != value


def _plain(value: Any) -> str:
    """A value of a recipe as text; booleans as YAML spells them."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def disk_time(reading: DiskReading) -> str:
    """Describe the time spent waiting for the disk."""
    return f"reading: {reading.seconds:.1f} s waiting for {megabytes(reading.size_bytes)} MB of weights"


def on_device(result: RunResult) -> bool:
    """Return whether the run used an accelerator."""
    return any(cost.device_bytes for cost in result.costs.values())


def rows(result: RunResult) -> list[tuple[str, ...]]:
    """List rows (phase, seconds, MB), and the MB of the accelerator if one was used."""
    table = [(name, f"{cost.seconds:.1f}", megabytes(cost.peak_bytes)) for name, cost in result.costs.items()]
    if not on_device(result):
        return table
    return [(*row, megabytes(c.device_bytes)) for row, c in zip(table, result.costs.values(), strict=True)]
