"""The plan of a sweep: every combination is read and planned before the first run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.containers.files import tensor_file_bytes, user_path
from compress.errors import RecipeError, ShortageError, UserError
from compress.evaluation.store import digest_of
from compress.passes.contract.limits import size_of
from compress.passes.contract.memory import available_bytes
from compress.passes.contract.problems import Problems, mistakes_in
from compress.pipeline.attempts import RecipeText, RunTask
from compress.pipeline.fitting import LIBRARIES_BYTES
from compress.pipeline.output import check_space
from compress.pipeline.plan import Plan, plan
from compress.pipeline.provenance import code_of
from compress.recipe.axes import Axis, Combination, axes_of, combinations, labels
from compress.recipe.schema import Recipe
from compress.recipe.settings import Setting
from compress.recipe.shipped import find_recipe
from compress.recipe.tables import ResultTable, Shown, megabytes
from compress.recipe.yaml import read_file, yaml_of

LOGS = "logs"
"""The folder with a log of each run, in the folder of the sweep."""


@dataclass(frozen=True)
class PlannedRun:
    """A combination of a sweep with its plan.

    Attributes:
        combination: Its values.
        recipe: Its recipe.
        plan: What `compress.plan` says of it.
        task: The run.
        identity: Digest of its recipe, code and model.
    """

    combination: Combination
    recipe: Recipe
    plan: Plan
    task: RunTask
    identity: str


@dataclass(frozen=True, repr=False)
class SweepPlan(Shown):
    """The plan of a sweep.

    Attributes:
        recipe: Name of the recipe.
        axes: The options that vary.
        runs: One for each combination, in their order.
        folder: The output folder.
    """

    recipe: str
    axes: tuple[Axis, ...]
    runs: tuple[PlannedRun, ...]
    folder: Path

    def tables(self) -> list[ResultTable]:
        """Return a row for each run: its values, the size of its checkpoint and the memory that it needs."""
        head = (*labels([axis.key for axis in self.axes]), "checkpoint, MB", "memory, MB", "folder")
        rows = [
            (
                *map(str, run.combination.values.values()),
                megabytes(run.plan.checkpoint_bytes),
                megabytes(run.task.memory_bytes or run.task.needed_bytes),
                str(run.task.folder),
            )
            for run in self.runs
        ]
        return [ResultTable(f"{len(rows)} runs of {self.recipe}", head, rows)]


@dataclass(frozen=True)
class SweepOptions:
    """What all runs of a sweep share.

    Attributes:
        settings: Values that replace those of the recipe in all runs.
        memory: Limit of memory of each run, as of `run`.
        overwrite: Whether to replace other runs in the folders.
    """

    settings: tuple[Setting, ...] = ()
    memory: str | int | None = None
    overwrite: bool = False


def plan_sweep(
    recipe: Recipe | str | Path,
    over: Mapping[str, Iterable[Any]] | Sequence[Axis],
    out: str | Path | None = None,
    options: SweepOptions | None = None,
) -> SweepPlan:
    """Read and plan every combination; nothing is written.

    Args:
        recipe: A recipe, or the path of its YAML file, or the name of a shipped one.
        over: The values of each option by its key.
        out: Folder of the sweep; None for `out/NAME-sweep`.
        options: What all runs share.

    Raises:
        UserError: for all mistakes of all combinations, each with the name of its combination.
        ShortageError: for a combination that does not fit the limit of memory.
    """
    options = options or SweepOptions()
    axes = tuple(axes_of(over) if isinstance(over, Mapping) else over)
    text = recipe_text(recipe)
    folder = user_path(out) if out is not None else Path("out") / f"{Path(text.name).stem}-sweep"
    problems, runs = Problems(), []
    for combination in combinations(axes):
        try:
            runs.append(_planned(combination, text, folder, options))
        except UserError as error:
            for mistake in mistakes_in(error):
                problems.add(RecipeError(f"{combination.name}: {mistake}"))
        except ShortageError as error:
            raise ShortageError(f"{combination.name}: {error}") from error
    problems.check()
    missing = [max(0, run.plan.checkpoint_bytes - tensor_file_bytes(run.task.folder)) for run in runs]
    check_space(folder, sum(missing))
    return SweepPlan(text.name, axes, tuple(runs), folder)


def recipe_text(recipe: Recipe | str | Path) -> RecipeText:
    """Return the text of a recipe, which other processes read.

    Raises:
        RecipeError: if there is no such file.
    """
    if isinstance(recipe, Recipe):
        return RecipeText(yaml_of(recipe.stated()), "recipe", None)
    path = find_recipe(recipe)
    return RecipeText(read_file(path), str(path), path.parent.absolute())


def _planned(combination: Combination, text: RecipeText, folder: Path, options: SweepOptions) -> PlannedRun:
    settings = (*options.settings, *combination.settings)
    recipe, inner = text.read(settings), folder / combination.name
    planned = plan(recipe, inner, memory=options.memory)
    # the run leaves the verification by transformers out where the memory is too small for it
    is_verified = planned.verification_bytes <= available_bytes(torch.device("cpu"))
    needed = max(planned.memory_bytes, planned.verification_bytes if is_verified else 0)
    task = RunTask(
        combination.name,
        text,
        settings,
        inner,
        folder / LOGS / f"{combination.name}.log",
        needed + LIBRARIES_BYTES,
        None if options.memory is None else size_of(options.memory),
        recipe.device,
        is_verified,
        options.overwrite,
    )
    identity = digest_of(recipe.model_dump(mode="json"), code_of(recipe), planned.fingerprint)
    return PlannedRun(combination, recipe, planned, task, identity)
