"""Wall time of runs and of an evaluation with several processes of one thread each, relative to one process.

    python tests/benchmarks/ranks.py MODEL CALIBRATION.npy EVALUATION.npy [NAME...] [--processes 2] [--batch 4]

NAME: of CHAINS, or evaluation; by default all. Every run is a process of its own, or several that find each other as
under torchrun, from its start to the complete checkpoint and report, with the evaluation that recipes have by default;
`passes`: the phases of the report that belong to passes. evaluation: `compress eval` of MODEL on the windows. All runs
take turns in one call, so that they meet the same machine. One JSON line per NAME:

    name, processes, seconds [one, several], ratio, cpu [one, several], cpu_ratio, passes [one, several], passes_ratio,
    peak_mb [one, several], agreement

cpu: the largest processor time of a process, which hardly depends on what else the machine does; a process that waits
for another one takes nearly none. peak_mb: the largest resident memory of a process. agreement: the share of weights
on which both checkpoints agree, or, for the evaluation, the difference of the losses.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

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
    """Seconds until all processes have ended, the largest processor time and resident memory (MB) of one of them."""
    begin, peak, cpu = time.perf_counter(), 0, 0.0
    started = start(command, processes)
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
    found, spent = [], []
    for processes in (1, given.processes):
        out = folder / f"{name}-{processes}"
        found.append(measured(["-m", "compress", "run", str(recipe), "-o", str(out)], processes))
        costs = json.loads((out / "report.json").read_text())["costs"]
        spent.append(sum(cost["seconds"] for phase, cost in costs.items() if phase not in OTHERS))
    passes = {"passes": [round(s, 1) for s in spent], "passes_ratio": round(spent[1] / spent[0], 3)}
    return (
        row(name, given.processes, found)
        | passes
        | {"agreement": round(agreement(folder / f"{name}-1", folder / f"{name}-{given.processes}"), 5)}
    )


def compare_evaluations(given: argparse.Namespace, folder: Path) -> dict:
    found, losses = [], []
    for processes in (1, given.processes):
        out = folder / f"{processes}.json"
        windows, length = np.load(given.evaluation, mmap_mode="r").shape
        text = ["--text", str(Path(given.evaluation).resolve()), "--windows", str(windows), "--length", str(length)]
        text += ["--work", str(folder / f"work{processes}")]
        command = ["-m", "compress", "eval", given.model, *text, "-o", str(out)]
        found.append(measured(command, processes))
        (model,) = json.loads(out.read_text())["models"]
        losses.append(model["texts"][0]["score"]["loss"])
    return row(EVALUATION, given.processes, found) | {"losses": losses}


def row(name: str, processes: int, found: list[dict[str, float]]) -> dict:
    one, several = found
    return {
        "name": name,
        "processes": processes,
        "seconds": [round(one["seconds"], 1), round(several["seconds"], 1)],
        "ratio": round(several["seconds"] / one["seconds"], 3),
        "cpu": [round(one["cpu"], 1), round(several["cpu"], 1)],
        "cpu_ratio": round(several["cpu"] / one["cpu"], 3),
        "peak_mb": [round(one["peak_mb"]), round(several["peak_mb"])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("evaluation")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for name in given.names or [*CHAINS, EVALUATION]:
            folder = Path(place)
            found = compare_evaluations(given, folder) if name == EVALUATION else compare_runs(name, given, folder)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
