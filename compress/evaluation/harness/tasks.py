"""Load tasks of lm-eval, with local data where a folder has it, and run one task at a time."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml

from compress.checkpoint.containers.files import write_text
from compress.errors import CompressError, RecipeError, did_you_mean
from compress.evaluation.harness.adapter import quiet
from compress.numerics.statistics import Estimate, jackknife, mean
from compress.recipe.evaluation import Evaluate

KINDS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
"""The builder of the library `datasets` for each ending of a local data file."""

SPLITS = {
    "training_split": ("train", "training"),
    "validation_split": ("validation", "valid", "dev"),
    "test_split": ("test",),
}
"""The names of the local files that hold each split of a task."""


class TaskError(CompressError):
    """A task cannot be loaded or run; the other tasks are run."""


def check_tasks(settings: Evaluate) -> None:
    """Check the names of tasks and the data folder before a model is loaded.

    Raises:
        RecipeError: for an unknown task, a missing folder, and if lm-eval is not installed.
    """
    if not settings.tasks:
        return
    if settings.data is not None and not Path(settings.data).is_dir():
        raise RecipeError(f"eval data: no folder {settings.data}; write the folder that holds TASK/SPLIT.parquet")
    names = task_manager(settings).all_tasks
    for name in settings.tasks:
        if name not in names and not Path(name).is_file():
            raise RecipeError(f"eval tasks: {name!r} is not known{did_you_mean(name, names)}; or write a YAML file")


def task_manager(settings: Evaluate) -> Any:
    """Index lm-eval's tasks and the task files in the data folder.

    If all tasks are plain ones, only their folders are read: the complete index reads 14000 files.

    Raises:
        RecipeError: if lm-eval is not installed.
    """
    data_folders = () if settings.data is None or not any(Path(settings.data).glob("**/*.yaml")) else (settings.data,)
    own_index = _index(data_folders, False)
    stock_names = [name for name in settings.tasks if name not in own_index.all_subtasks]
    files = None if set(stock_names) & set(own_index.all_tasks) else _files_of(tuple(stock_names))
    if files is None:
        return _index(data_folders, True)
    index = _index((*sorted({str(path.parent) for path in files.values()}), *data_folders), False)
    entries = index.task_index
    is_complete = all(name in entries and entries[name].yaml_path == path for name, path in files.items())
    return index if is_complete else _index(data_folders, True)


@cache
def _index(folders: tuple[str, ...], defaults: bool) -> Any:
    """The tasks of some folders. defaults: and those of lm-eval."""
    with quiet():
        return _lm_eval().TaskManager(include_path=list(folders), include_defaults=defaults)


def _lm_eval() -> Any:
    """The tasks' package. Raises RecipeError if it cannot be imported."""
    try:
        from lm_eval import tasks
    except ImportError as error:
        raise RecipeError(
            f"eval tasks: the package lm-eval cannot be imported ({error}); pip install 'compress-llm[eval]'"
        ) from error
    return tasks


@cache
def _files_of(names: tuple[str, ...]) -> dict[str, Path] | None:
    """The file of lm-eval that defines each task; None where there is not exactly one, as for groups and tags."""
    file_by_name: dict[str, Path] = {}
    if not names:
        return file_by_name
    either = "|".join(map(re.escape, names)).encode()
    line = re.compile(rb"^[\"']?(task|group|tag)[\"']?\s*:\s*[\"']?(" + either + rb")[\"']?\s*(?:#.*)?$", re.MULTILINE)
    for path in Path(_lm_eval().__file__).parent.rglob("*.yaml"):
        for kind, name in line.findall(path.read_bytes()):
            if kind != b"task" or name.decode() in file_by_name:
                return None
            file_by_name[name.decode()] = path
    return file_by_name if len(file_by_name) == len(names) else None


def local_files(name: str, data: str | None) -> dict[str, str]:
    """Find the data files of a task in a folder, by the option of their split."""
    folder = None if data is None else Path(data) / name
    if folder is None or not folder.is_dir():
        return {}
    path_by_stem = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in KINDS}
    file_by_option = {
        option: next((path_by_stem[stem] for stem in stems if stem in path_by_stem), None)
        for option, stems in SPLITS.items()
    }
    return {option: str(path) for option, path in file_by_option.items() if path is not None}


def local_changes(files: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a task that read local files instead of the hub."""
    kinds = {KINDS[Path(file).suffix] for file in files.values()}
    if len(kinds) > 1:
        raise TaskError(f"files of different kinds ({', '.join(sorted(files.values()))}); keep files of one kind")
    names = {option: stems[0] for option, stems in SPLITS.items()}
    return {
        "dataset_path": kinds.pop(),
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {names[option]: file for option, file in files.items()}},
        **{option: names[option] if option in files else None for option in SPLITS},
    }


def load_tasks(name: str, manager: Any, settings: Evaluate) -> dict[str, Any]:
    """Load the tasks of a name, of a group or of a YAML file, by name.

    Raises:
        TaskError: if they cannot be loaded.
    """
    files = local_files(name, settings.data)

    def load() -> dict[str, Any]:
        with quiet(), TemporaryDirectory() as folder:
            spec = name
            if files:  # a task file that includes the stock one
                changed = {"include": str(manager.task_index[name].yaml_path), "task": name} | local_changes(files)
                spec = str(Path(folder) / "task.yaml")
                write_text(Path(spec), yaml.safe_dump(changed))
            return dict(manager.load(spec)["tasks"])

    place = "" if settings.data is None or files else f" and {Path(settings.data) / name} holds no data file of it"
    hint = f"use a data folder with {name}/validation.parquet or {name}/test.parquet where the hub is out of reach"
    tasks = attempt(load, f"task {name} cannot be loaded{place}", hint)
    for task in tasks.values():
        shots = task.get_config("num_fewshot")
        task.set_config(
            key="num_fewshot", value=shots or 0 if settings.fewshot is None or shots == 0 else settings.fewshot
        )
        task.set_fewshot_seed(seed=settings.seed)
    return tasks


def run_task(name: str, task: Any, model: Any, settings: Evaluate) -> dict[str, Any]:
    """Run one task, and return the fields of `TaskScore`.

    Raises:
        TaskError: if it cannot be run.
    """
    from lm_eval.evaluator import evaluate

    def run() -> Any:
        random.seed(0)
        np.random.seed(settings.seed)
        torch.manual_seed(settings.seed)
        with quiet():
            return evaluate(
                model,
                {"tasks": {name: task}, "groups": {}, "group_map": {}},
                limit=settings.limit,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=settings.chat_template,
            )

    columns = ", ".join(task.eval_docs.column_names) if hasattr(task.eval_docs, "column_names") else "unknown"
    result = attempt(run, f"task {name} cannot be run", f"the columns of its data are: {columns}")
    return {
        "task": name,
        "version": str(result["versions"].get(name)),
        "fewshot": result["n-shot"].get(name, 0),
        "items": result["n-samples"][name]["effective"],
        "of": result["n-samples"][name]["original"],
        "metrics": metrics_of(task, result["results"][name], result["samples"][name]),
    }


def metrics_of(task: Any, results: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute value, standard error and values of all items of every metric, as the fields of `Metric`."""
    metrics: dict[str, Any] = {}
    better = task.higher_is_better()
    by_metric: dict[str, list[Any]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        for metric in sample["metrics"]:
            by_metric[f"{metric},{sample['filter']}"].append(sample[metric])
    for key, items in by_metric.items():
        metric, _, kind = key.partition(",")
        plain = all(isinstance(item, int | float | np.number) for item in items)
        values = [float(item) for item in items] if plain else None
        aggregate = task.aggregation().get(metric)
        averaged = values is not None and Estimate(results[key], None).value == mean(values).value
        error = (
            mean(values).stderr
            if averaged and values is not None
            else jackknife(aggregate, items)
            if aggregate
            else None
        )
        metrics[metric if kind == "none" else f"{metric} ({kind})"] = {
            "value": float(results[key]),
            "stderr": error,
            "higher_is_better": bool(better.get(metric, True)),
            "values": values if averaged else None,
        }
    return metrics


def attempt(call: Callable[[], Any], place: str, hint: str) -> Any:
    """Call code of lm-eval, of a task file or of the library `datasets`.

    Raises:
        TaskError: for any error.
    """
    try:
        return call()
    except CompressError as error:
        raise TaskError(f"{place}: {error}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise TaskError(f"{place} ({type(error).__name__}: {reason}); {hint}") from error
