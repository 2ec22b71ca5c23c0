"""`compress sweep`: many runs of one recipe with different values, in parallel, and their comparison."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compress.cli.group import Interrupt, without_collection
from compress.cli.options import MODEL, RECIPE, recipe_options, settings_of
from compress.cli.paths import UserPath
from compress.cli.show import echo, in_words, print_json, print_table

if TYPE_CHECKING:
    from compress.report.sweep import SweptRun

TELEMETRY = "RAY_USAGE_STATS_ENABLED"
"""The variable by which Ray decides whether to report its use to its authors."""


@click.command()
@RECIPE
@MODEL
@recipe_options
@click.option(
    "--over",
    "over",
    multiple=True,
    required=True,
    metavar="KEY=VALUE,...",
    help="Values of an option of the recipe, such as passes.0.gptq.group_size=32,64 or model=A,B; repeatable: every "
    "combination is run.",
)
@click.option("--address", help="Address of a Ray cluster, such as auto; without it, Ray runs on this machine.")
@click.option(
    "--cpus",
    type=click.IntRange(min=1),
    help="Processor cores, and threads, of each run; default: those of the machine, divided by the runs that fit.",
)
@click.option(
    "--gpus",
    type=click.FloatRange(min=0),
    help="GPUs of each run, such as 0.5 for two runs on one; default: 1 for a run on a GPU.",
)
@click.option("--memory", metavar="SIZE", help="Limit of memory of each run, such as 8GB.")
@click.option("-o", "--out", type=UserPath(), help="Folder of all runs; default: out/RECIPE-sweep.")
@click.option("--overwrite", is_flag=True, help="Replace other runs in the folders of the runs.")
@click.option("--plan", "plan_only", is_flag=True, help="Print the plan of all runs, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print sweep.json.")
def sweep(
    recipe: str,
    model: str | None,
    over: tuple[str, ...],
    address: str | None,
    cpus: int | None,
    gpus: float | None,
    memory: str | None,
    out: Path | None,
    overwrite: bool,
    plan_only: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run RECIPE with every combination of the values of --over, in parallel on Ray, and compare the results.

    RECIPE is a file, or a name of `compress recipes`. The same command continues: complete runs are not run again.
    """
    from compress.recipe.axes import read_axis

    axes, settings = [read_axis(text) for text in over], settings_of(**options, model=model)
    os.environ.setdefault(TELEMETRY, "0")
    with without_collection():
        from compress.pipeline.on_ray import OnRay, imported
        from compress.pipeline.progress import Waiting
        from compress.pipeline.sweep import FILE, PAGE, run_planned
        from compress.pipeline.sweep_plan import LOGS, SweepOptions, plan_sweep

    if not plan_only:
        imported()
    with Waiting(f"planning the runs of {recipe}"):
        planned = plan_sweep(recipe, axes, out, SweepOptions(tuple(settings), memory, overwrite))
    if plan_only:
        [table] = planned.tables()
        if as_json:
            print_json([dict(zip(table.head, row, strict=True)) for row in table.rows])
        else:
            print_table(table)
        return
    echo(f"{len(planned.runs)} runs in {planned.folder}, their logs in {planned.folder / LOGS}", err=True)
    with Interrupt():
        result = run_planned(planned, OnRay(address, cpus, gpus), _show)
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        print_table(result.table())
        echo(f"{planned.folder / PAGE} and {planned.folder / FILE}")
    result.check()


def _show(run: SweptRun, count: int, of: int) -> None:
    """Print the end of a run on standard error."""
    seconds = "" if run.seconds is None else f" ({in_words(run.seconds)})"
    echo(f"{count} of {of}: {run.name}: {run.text}{seconds}", err=True)
