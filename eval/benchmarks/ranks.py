"""Wall time of runs and of an evaluation with several processes of one thread each, relative to one process.

    python eval/benchmarks/ranks.py MODEL CALIBRATION.npy EVALUATION.npy [NAME...] [--processes 2] [--batch 4] [--beside]

NAME: of CHAINS, or evaluation; by default all. Every run is a process of its own, or several that find each other as
under torchrun, from its start to the complete checkpoint and report, with the evaluation that recipes have by default.
evaluation: `compress eval` of MODEL on the windows. All runs take turns in one call, so that they meet the same
machine. One JSON line per NAME, in which pairs are those of one and of several processes:

    name, processes, seconds, ratio, cpu, cpu_ratio, beside, peak_mb, passes, passes_ratio, evaluate, evaluate_ratio,
    agreement

cpu: the largest processor time of a process, which hardly depends on what else the machine does; a process that waits
for another one takes nearly none. beside: only with --beside, by what factor the run of one process is slower while as
many as there are processes run at once, each for itself, because the cores share caches and memory; ratio cannot fall
below beside / processes. peak_mb: the largest resident memory of a process. passes, evaluate: the phases of the report
that belong to passes, and the evaluation. agreement: the share of weights on which both checkpoints agree, or, for the
evaluation, `losses`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from launching import agreement, start

CHAINS = {
    "gptq": ["gptq: {weights: int4, group_size: 64}"],
    "wanda": ["wanda: {sparsity: 0.5}"],
    "awq": ["awq: {weights: int4, group_size: 64}", "rtn: {weights: int4, group_size: 64}"],
    "signround": ["signround: {weights: int4, group_size: 64, iterations: 10}"],
}
EVALUATION = "evaluation"
OTHERS = {"capture", "save", "verify", "evaluate", "restore", "calibration text"}
"""Phases that belong to no pass."""


def measured(command: list[str], processes: int) -> dict[str, float]:
    """Seconds until the processes, which divide the work, have ended, and what the most expensive of them used."""
    return watched(time.perf_counter(), start(command, processes))


def beside(commands: list[list[str]], alone: float) -> float:
    """The factor of the seconds of processes that do not know of each other. alone: seconds of one without others."""
    begin = time.perf_counter()
    found = watched(begin, [process for command in commands for process in start(command, 1)])
    return found["seconds"] / alone


def watched(begin: float, started: list[subprocess.Popen]) -> dict[str, float]:
    """Seconds until all processes have ended, the largest processor time and resident memory (MB) of one of them."""
    peak, cpu = 0, 0.0
    told: list[str] = []
    drains = [threading.Thread(target=lambda p=process: told.extend(p.communicate())) for process in started]
    for drain in drains:
        drain.start()
    while any(process.poll() is None for process in started):
        for process in started:
            try:
                known = psutil.Process(process.pid)
                peak, cpu = max(peak, known.memory_info().rss), max(cpu, sum(known.cpu_times()[:2]))
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.1)
    for drain in drains:
        drain.join()
    assert all(process.returncode == 0 for process in started), "\n".join(told)
    return {"seconds": time.perf_counter() - begin, "cpu": cpu, "peak_mb": peak / 1e6}


def compare_runs(name: str, given: argparse.Namespace, folder: Path) -> dict:
    recipe = folder / f"{name}.yaml"
    passes = "".join(f"  - {step}\n" for step in CHAINS[name])
    recipe.write_text(
        f"model: {Path(given.model).resolve()}\ncalibration: {{source: {Path(given.calibration).resolve()}, "
        f"sequences: null, length: null, batch: {given.batch}}}\npasses:\n{passes}save: {{format: native, verify: own}}\n"
    )
    command = ["-m", "compress", "run", str(recipe), "-o"]
    found, costs = [], []
    for processes in (1, given.processes):
        out = folder / f"{name}-{processes}"
        found.append(measured([*command, str(out)], processes))
        costs.append(json.loads((out / "report.json").read_text())["costs"])
    phases = {
        "passes": [sum(cost["seconds"] for phase, cost in one.items() if phase not in OTHERS) for one in costs],
        "evaluate": [one["evaluate"]["seconds"] for one in costs],
    }
    if given.beside:
        others = [[*command, str(folder / f"{name}-beside{i}")] for i in range(given.processes)]
        found[0]["beside"] = beside(others, found[0]["seconds"])
    agree = agreement(folder / f"{name}-1", folder / f"{name}-{given.processes}")
    return row(name, given.processes, found) | ratios(phases) | {"agreement": round(agree, 5)}


def compare_evaluations(given: argparse.Namespace, folder: Path) -> dict:
    windows, length = np.load(given.evaluation, mmap_mode="r").shape
    text = ["--text", str(Path(given.evaluation).resolve()), "--windows", str(windows), "--length", str(length)]
    found, losses = [], []

    def command(name: str) -> list[str]:
        places = ["--work", str(folder / f"work-{name}"), "-o", str(folder / f"{name}.json")]
        return ["-m", "compress", "eval", given.model, *text, *places]

    for processes in (1, given.processes):
        found.append(measured(command(f"{processes}"), processes))
        (model,) = json.loads((folder / f"{processes}.json").read_text())["models"]
        losses.append(model["perplexity"][0]["compressed"]["loss"])
    if given.beside:
        others = [command(f"beside{i}") for i in range(given.processes)]
        found[0]["beside"] = beside(others, found[0]["seconds"])
    return row(EVALUATION, given.processes, found) | {"losses": losses}


def row(name: str, processes: int, found: list[dict[str, float]]) -> dict:
    one, several = found
    alone = {"beside": round(one["beside"], 3)} if "beside" in one else {}
    times = ratios({"seconds": [one["seconds"], several["seconds"]], "cpu": [one["cpu"], several["cpu"]]})
    return {"name": name, "processes": processes, **times, **alone, "peak_mb": [round(f["peak_mb"]) for f in found]}


def ratios(times: dict[str, list[float]]) -> dict:
    """The seconds of one and of several processes, and their ratios, by name."""
    found: dict = {}
    for name, (one, several) in times.items():
        ratio = "ratio" if name == "seconds" else f"{name}_ratio"
        found |= {name: [round(one, 1), round(several, 1)], ratio: round(several / one, 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("evaluation")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--beside", action="store_true", help="run independent processes, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for name in given.names or [*CHAINS, EVALUATION]:
            folder = Path(place)
            found = compare_evaluations(given, folder) if name == EVALUATION else compare_runs(name, given, folder)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
