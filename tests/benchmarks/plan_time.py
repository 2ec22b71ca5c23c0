"""The time that `compress plan --time` predicts against that of the run, each by phase.

    python tests/benchmarks/plan_time.py RECIPE.yaml... [--model PATH] [--set KEY=VALUE ...] [--processor]

The trials are measured anew. One JSON line per recipe: predicted and real seconds of every phase and of all, their
ratio, and the seconds of the prediction itself. --processor: processor time of this process instead of wall time, for a
machine under other load (one thread).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import torch
from huggingface_hub import constants

import compress
from compress.evaluate import windows
from compress.passes.contract import context
from compress.pipeline import trial
from compress.pipeline.plan import plan
from compress.recipe.settings import Setting, read_setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE.yaml")
    parser.add_argument("--model")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = process_time if arguments.processor else perf_counter
    for module in (context, windows, trial):
        module.perf_counter = clock
    settings = [read_setting(text) for text in arguments.sets]
    if arguments.model:
        settings.append(Setting(("model",), arguments.model, "--model"))
    for path in arguments.recipes:
        with TemporaryDirectory() as folder:
            constants.HF_HOME = folder
            recipe = compress.Recipe.from_yaml(Path(path), settings)
            begin = clock()
            found = plan(recipe, time=True).timing
            took = clock() - begin
            report = compress.run(recipe, Path(folder) / "out", progress=False).report
        assert found is not None and found.phases, found
        real = {name: cost["seconds"] for name, cost in report["costs"].items() if name in found.phases}
        rows = {name: [round(found.phases[name], 2), round(real.get(name, 0.0), 2)] for name in found.phases}
        row = {"recipe": Path(path).name, "phases": rows, "predicted": round(found.seconds, 2)}
        row |= {"real": round(sum(real.values()), 2), "ratio": round(found.seconds / sum(real.values()), 3)}
        print(json.dumps(row | {"trial_seconds": round(took, 2), "unknown": found.unknown}), flush=True)


if __name__ == "__main__":
    main()
