"""How long the command line takes to start: wall and CPU seconds of the fastest of several starts, in JSON lines.

    python eval/benchmarks/startup.py [--model PATH] [--run FOLDER] [--gguf FILE] [--repeat 5]

'floor' is the import of torch and of one model class of transformers, which every command that opens a model needs; the
difference is the part of this package. Run it on an idle machine, with bytecode (without PYTHONDONTWRITEBYTECODE).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

PICO = Path(__file__).parents[2] / "tests" / "pico" / "model"
MISTAKE = 2
"""The exit code after a mistake of the user."""
FLOOR = "import torch; from transformers import PreTrainedModel, AutoModelForCausalLM"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(PICO), help="local folder of the model that is planned")
    parser.add_argument("--run", help="output folder of a run, whose report is written again and compared")
    parser.add_argument("--gguf", help=".gguf file that is inspected")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(f"model: {json.dumps(arguments.model)}\npasses: [{{scheme: W4A16}}]\n")
        wrong = Path(folder) / "wrong.yaml"
        wrong.write_text("model: m\npasses: [{gptq: {wieghts: int4}}]\n")
        command = ["-m", "compress"]
        commands = {
            "compress --help": [*command, "--help"],
            "compress quantize --help": [*command, "quantize", "--help"],
            "compress passes": [*command, "passes"],
            "compress passes gptq": [*command, "passes", "gptq"],
            "compress recipes": [*command, "recipes"],
            "compress schemes": [*command, "schemes"],
            "an unknown option in a recipe": [*command, "run", str(wrong)],
            "compress inspect FOLDER": [*command, "inspect", arguments.model],
            "floor": ["-c", FLOOR],
            "compress plan": [*command, "plan", str(recipe)],
        }
        if arguments.run is not None:
            commands["compress report RUN"] = [*command, "report", arguments.run, "--no-open"]
            commands["compress compare RUN RUN"] = [*command, "compare", arguments.run, arguments.run]
        if arguments.gguf is not None:
            commands["compress inspect FILE.gguf"] = [*command, "inspect", arguments.gguf]
        for name, words in commands.items():
            print(json.dumps({"start": name, **fastest(words, arguments.repeat)}), flush=True)


def fastest(words: list[str], repeat: int) -> dict[str, float]:
    """The least wall and CPU seconds of `repeat` starts of Python; one more start before them writes bytecode."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    wall, cpu = [], []
    for _ in range(repeat + 1):
        before, begin = used(), perf_counter()
        done = subprocess.run([sys.executable, *words], capture_output=True, env=environment, text=True)
        if done.returncode not in (0, MISTAKE):
            raise SystemExit(done.stderr)
        wall.append(perf_counter() - begin)
        cpu.append(used() - before)
    return {"seconds": round(min(wall[1:]), 2), "cpu_seconds": round(min(cpu[1:]), 2)}


def used() -> float:
    """CPU seconds of finished child processes."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


if __name__ == "__main__":
    main()
