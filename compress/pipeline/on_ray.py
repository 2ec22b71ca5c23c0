"""Run the tasks of a sweep on Ray: in parallel on this machine, or on the machines of a cluster.

Ray starts a process for each run, where its processor cores, memory and GPU are free. Only `sweep` imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from compress.errors import ShortageError, UserError
from compress.pipeline.attempts import Outcome, RunTask, attempt, in_one_line
from compress.recipe.tables import megabytes

INSTALL = 'pip install "compress-llm[sweep]"'
STORE_BYTES = 100 << 20
"""Memory of Ray's object store: only small values go through it. Ray asks for 75 MiB at least."""
LOOK_SECONDS = 1.0
"""How long to wait for Ray at a time: Python handles an interrupt in between."""


@dataclass(frozen=True)
class OnRay:
    """Run tasks on Ray.

    Attributes:
        address: Address of a cluster, such as 'auto' or 'ray://head:10001'; None starts Ray on this machine, or uses
            the one that the program has started.
        cpus: Processor cores, and threads, of each run; None divides those of this machine.
        gpus: GPUs of each run; less than one lets several runs share a GPU. None: one for a run that computes on a GPU
            of this machine.
    """

    address: str | None = None
    cpus: int | None = None
    gpus: float | None = None

    def outcomes(self, tasks: Sequence[RunTask]) -> Generator[Outcome, None, None]:
        ray = imported()
        with self._connected(ray):
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            cores = int(max(node.get("CPU", 0) for node in nodes))
            cpus = self.cpus or _cores_of_run(tasks, nodes)
            for task in tasks:
                _check(task, self._resources(task, cpus), nodes)
            is_local = self.address is None
            share = int(max(node.get("memory", 0) for node in nodes)) * cpus // max(cores, 1)
            function = ray.remote(max_calls=1, max_retries=0)(in_worker)  # a new process for each run
            pending: dict[Any, RunTask] = {}
            for task in tasks:
                resources = self._resources(task, cpus)
                limit = task.memory_bytes
                if (
                    limit is None and is_local and task.has_limit and not resources["num_gpus"]
                ):  # runs that begin together see the same free memory
                    limit = resources["memory"] = max(share, task.needed_bytes)
                remote = function.options(name=task.name, **resources)
                pending[remote.remote(task, limit, cpus, os.getcwd())] = task
            try:
                while pending:
                    ready, _ = ray.wait(list(pending), num_returns=1, timeout=LOOK_SECONDS)
                    for reference in ready:
                        yield _outcome(ray, reference, pending.pop(reference))
            finally:
                for reference in pending:  # interrupted
                    with suppress(ray.exceptions.RayError):
                        ray.cancel(reference, force=True)

    @contextmanager
    def _connected(self, ray: Any) -> Iterator[None]:
        if ray.is_initialized():
            yield
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if self.address is None:
            cores = torch.get_num_threads() if self.cpus is None else max(self.cpus, torch.get_num_threads())
            local = {"num_cpus": cores, "object_store_memory": STORE_BYTES, "include_dashboard": False}
            ray.init(address="local", **local, **quiet)
        else:
            try:
                ray.init(address=self.address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UserError(
                    f"address {self.address}: no Ray cluster answers ({in_one_line(error)}); start one with `ray start`"
                    ", or leave the address out to use this machine"
                ) from error
        try:
            yield
        finally:
            ray.shutdown()

    def _resources(self, task: RunTask, cpus: int) -> dict[str, Any]:
        gpus = float(task.on_gpu) if self.gpus is None else self.gpus
        return {"num_cpus": cpus, "num_gpus": gpus, "memory": task.memory_bytes or task.needed_bytes}


def imported() -> Any:
    """Import Ray.

    Raises:
        UserError: if it is not installed.
    """
    try:
        import_module("ray.exceptions")
        return import_module("ray")
    except ImportError as error:
        raise UserError(f"many runs need Ray, which is not installed; install it with {INSTALL}") from error


def in_worker(task: RunTask, memory_bytes: int | None, threads: int, folder: str) -> Outcome:
    """Run a task in a process of Ray. folder: the current one of the sweep, to which paths are relative."""
    if Path(folder).is_dir():
        os.chdir(folder)
    return attempt(task, memory_bytes, threads)


def _cores_of_run(tasks: Sequence[RunTask], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return the cores of each run: those of the largest machine, divided by the runs that fit into it together."""
    largest = max(nodes, key=lambda node: node.get("CPU", 0))
    cores, memory = max(1, int(largest.get("CPU", 1))), largest.get("memory", 0)
    most = max(task.memory_bytes or task.needed_bytes for task in tasks)
    at_once = min(len(tasks), cores, max(1, int(memory // most)))
    return max(1, cores // at_once)


def _check(task: RunTask, resources: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise ShortageError for a task for which no machine is large enough: Ray would wait for one.

    Raises UserError for one that names a GPU.
    """
    if ":" in task.device:
        raise UserError(
            f"{task.name}: device {task.device} is one GPU, but Ray gives each run its GPU; use device: cuda"
        )
    asked = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"], "memory": resources["memory"]}
    if any(all(node.get(name, 0) >= count for name, count in asked.items()) for node in nodes):
        return
    needs = f"{asked['CPU']} cores, {megabytes(asked['memory'])} MB of memory"
    needs += f" and {asked['GPU']:g} GPU" if asked["GPU"] else ""
    largest = {name: max(node.get(name, 0) for node in nodes) for name in asked}
    there = f"{largest['CPU']:.0f} cores, {megabytes(largest['memory'])} MB and {largest['GPU']:g} GPUs"
    raise ShortageError(
        f"{task.name}: needs {needs}, and the largest machine has {there}; state a limit of memory that the run keeps, "
        "or fewer cores"
    )


def _outcome(ray: Any, reference: Any, task: RunTask) -> Outcome:
    """Return the outcome of a finished task; one whose process ended has failed."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        return Outcome(task.name, 0.0, f"the process of the run ended: {_reason(error)}", complete=False)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
