"""sweep(recipe, over): run a recipe with every combination of some values, in parallel, and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from compress.checkpoint.containers.digests import WORK
from compress.checkpoint.containers.files import check_output_folder, write_text
from compress.errors import OutputError, UserError
from compress.pipeline.attempts import Executor, Outcome
from compress.pipeline.checkpoint import is_complete
from compress.pipeline.on_ray import OnRay
from compress.pipeline.sweep_plan import PlannedRun, SweepOptions, SweepPlan, plan_sweep
from compress.recipe.axes import Axis
from compress.recipe.schema import Recipe
from compress.report.pareto import variant_of
from compress.report.sweep import SweepResult, SweptRun
from compress.report.write import read_report
from compress.version import __version__

FILE, PAGE = "sweep.json", "sweep.html"
LOCK = "lock"

OnRun = Callable[[SweptRun, int, int], None]
"""Receives a run that ended, the number of those that have, and that of all."""


def sweep(
    recipe: Recipe | str | Path,
    over: Mapping[str, Iterable[Any]] | Sequence[Axis],
    out: str | Path | None = None,
    *,
    memory: str | int | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    on_run: OnRun | None = None,
) -> SweepResult:
    """Run a recipe with every combination of some values, in parallel, and compare the results.

    All combinations are planned first, so that an invalid one is named before any run. The base model is measured once.
    A run that fails is part of the result, and the others go on. The same call continues: complete runs are not run
    again, unfinished ones resume.

    Args:
        recipe: A recipe, or the path of its YAML file, or the name of a shipped one.
        over: The values of each option by its key, such as {"passes.0.gptq.group_size": [32, 64], "model": ["a", "b"]}.
        out: Folder of the sweep: one folder for each run, `sweep.json`, `sweep.html` and a log of each run. None for
            `out/NAME-sweep`.
        memory: Limit of memory of each run, as of `run`.
        overwrite: Whether to replace other runs in the folders.
        executor: Runs the runs; None for Ray on this machine.
        on_run: Is called after each run.

    Returns:
        The result; `SweepResult.check` raises an error if a run failed.

    Raises:
        UserError: for mistakes in any combination, before any run, and if Ray is not installed.
        ShortageError: for a run that needs more memory than there is, before any run.
        OutputError: for a folder that cannot be written, or in which another sweep works.
    """
    planned = plan_sweep(recipe, over, out, SweepOptions(memory=memory, overwrite=overwrite))
    return run_planned(planned, executor, on_run)


def run_planned(planned: SweepPlan, executor: Executor | None = None, on_run: OnRun | None = None) -> SweepResult:
    """Run a planned sweep; the arguments and errors are those of `sweep`."""
    with _locked(planned.folder):
        stored = _stored(planned.folder)
        rows = {run.task.name: _row(run, stored) for run in planned.runs}
        tasks = [run.task for run in planned.runs if rows[run.task.name].state != "complete"]
        by_name = {run.task.name: run for run in planned.runs}
        try:
            with closing((executor or OnRay()).outcomes(tasks)) as outcomes:
                for count, outcome in enumerate(outcomes if tasks else (), start=1):
                    row = _measured(by_name[outcome.name], rows[outcome.name], outcome)
                    rows[outcome.name] = row
                    _write(planned, rows)
                    if on_run is not None:
                        on_run(row, count, len(tasks))
        finally:
            result = _write(planned, rows)
            write_text(planned.folder / PAGE, result.html())
        return result


def _row(run: PlannedRun, stored: Mapping[str, SweptRun]) -> SweptRun:
    """Return the stored row of a run that is complete, or the row of one that has not begun."""
    row = stored.get(run.task.name)
    is_same = row is not None and row.state == "complete" and row.identity == run.identity
    if row is not None and is_same and is_complete(run.task.folder):
        return row
    return SweptRun(name=run.task.name, values=run.combination.values, model=run.recipe.model, identity=run.identity)


def _measured(run: PlannedRun, row: SweptRun, outcome: Outcome) -> SweptRun:
    """Return the row of a run that ended, with the measurements of its report."""
    changes: dict[str, Any] = {"error": outcome.error, "seconds": outcome.seconds, "state": "failed"}
    if outcome.complete:
        try:
            report = read_report(run.task.folder)
        except UserError as error:
            return row.model_copy(update=changes | {"error": str(error)})
        size = report.size
        changes["state"], changes["size_bytes"] = "complete", size.checkpoint_bytes
        changes["variant"] = variant_of(run.task.name, size.checkpoint_bytes, size.dense_bytes, report)
    return row.model_copy(update=changes)


def _write(planned: SweepPlan, rows: Mapping[str, SweptRun]) -> SweepResult:
    over = {axis.key: [setting.value for setting in axis.settings] for axis in planned.axes}
    result = SweepResult(compress=__version__, recipe=planned.recipe, over=over, runs=list(rows.values()))
    write_text(planned.folder / FILE, result.model_dump_json(indent=1) + "\n")
    return result


def _stored(folder: Path) -> dict[str, SweptRun]:
    """Return the rows of an earlier start of a sweep by name; none if they cannot be read."""
    try:
        result = SweepResult.model_validate_json((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return {}
    return {run.name: run for run in result.runs}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one sweep at a time work in a folder.

    Raises:
        OutputError: if another one does, or the folder cannot be written.
    """
    check_output_folder(folder)
    (folder / WORK).mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / WORK / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise OutputError(
            f"{folder}: another sweep works in this folder; wait until it ends, or choose another"
        ) from error
    try:
        yield
    finally:
        lock.release()
