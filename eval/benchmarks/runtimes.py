"""Decoding and prefill of one model in several programs, in turns: transformers, compress, llama.cpp and others.

    python eval/benchmarks/runtimes.py MODEL [CHECKPOINT ...] [--gguf FILE] [--llama-python PATH] [--torchao-python PATH]
        [--vllm FOLDER] [--vllm-python PATH] [--mlx FOLDER] [--mlx-python PATH]
        [--threads 2] [--rounds 5] [--compiled] [--contexts 16 1900]

MODEL: the dense folder, measured in float32 and bfloat16 by transformers and, with --torchao-python, through torchao in
int8 and int4. CHECKPOINT: loaded by compress, also with activations="int8", and with compile=False (transformers
generates, without recorded steps). FILE: run by llama.cpp and by compress, also in bfloat16. --compiled adds the dense
model compiled by torch.compile. Every program is a process of its own; all are loaded, and then measured one after the
other, round after round, so that they meet the same machine. --vllm and --mlx: a checkpoint that vLLM runs in its own
dtype, and a folder of format mlx. --llama-python and others: a Python with that program, if it is not this one. One JSON
line per program:

    name, mb (of the files of weights), decode N (tokens per second, 1 sequence, after a prompt of N tokens), prefill (of 512 tokens), and for each of
    them its ratio (median over the rounds of its rate relative to the faster dense model of that round)

and first one with the machine: instruction_set, threads, read_gbps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from compress.evaluation.speed import PREFILL, read_bandwidth
from compress.native.library import instruction_set

HERE = Path(__file__).parent
DENSE = "transformers float32", "transformers bfloat16"


class Program:
    """A process that measures one model when it is told to."""

    def __init__(self, name: str, command: list[str], threads: int):
        environment = {**os.environ, "OMP_NUM_THREADS": f"{threads}", "GOMP_SPINCOUNT": "1000", "HF_HUB_OFFLINE": "1"}
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.answer()  # it is loaded

    def answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        sys.exit(f"{self.name}: it ended before it answered")

    def measure(self, figure: str) -> float:
        """Tokens per second."""
        assert self.process.stdin is not None
        print(figure, file=self.process.stdin, flush=True)
        return float(self.answer())


def programs(given: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each program by its name."""
    ours = [sys.executable, str(HERE / "peer_transformers.py")]
    found = {f"transformers {dtype}": [*ours, "dense", given.model, dtype] for dtype in ("float32", "bfloat16")}
    if given.compiled:
        found["transformers bfloat16, compiled"] = [*ours, "compiled", given.model, "bfloat16"]
    if given.torchao_python:
        for bits in ("int8", "int4"):
            command = [given.torchao_python, str(HERE / "peer_transformers.py"), "torchao", given.model, bits]
            found[f"torchao {bits}"] = command
    for source in [*given.checkpoints, *([given.gguf] if given.gguf else [])]:
        name = Path(source).name
        found[f"compress {name}"] = [*ours, "load", source, "auto"]
        found[f"compress {name}, int8 inputs"] = [*ours, "load-int8", source, "auto"]
        found[f"compress {name}, not recorded"] = [*ours, "load-plain", source, "auto"]
    if given.gguf:
        found[f"compress {Path(given.gguf).name}, bfloat16"] = [*ours, "load", given.gguf, "bfloat16"]
        found[f"llama.cpp {Path(given.gguf).name}"] = [
            given.llama_python,
            str(HERE / "peer_llamacpp.py"),
            "speed",
            given.gguf,
            f"{given.threads}",
        ]
    if given.vllm:
        command = [given.vllm_python, str(HERE / "peer_vllm.py"), given.vllm, "auto"]
        found[f"vLLM {Path(given.vllm).name}"] = command
    if given.mlx:
        found[f"mlx-lm {Path(given.mlx).name}"] = [given.mlx_python, str(HERE / "peer_mlx.py"), given.mlx]
    return found


def megabytes(command: list[str]) -> float:
    """MB of the files of weights of the model in a command."""
    [source] = [Path(part) for part in command[2:] if Path(part).exists()]
    files = [source] if source.is_file() else [f for f in source.iterdir() if f.suffix in (".safetensors", ".gguf")]
    return round(sum(file.stat().st_size for file in files) / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("checkpoints", nargs="*")
    parser.add_argument("--gguf")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--torchao-python")
    parser.add_argument("--vllm")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--mlx")
    parser.add_argument("--mlx-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--contexts", type=int, nargs="+", default=[16])
    given = parser.parse_args()
    figures = [*(f"decode {context}" for context in given.contexts), "prefill"]
    commands = programs(given)
    started = [Program(name, command, given.threads) for name, command in commands.items()]
    rates: dict[str, dict[str, list[float]]] = {p.name: {figure: [] for figure in figures} for p in started}
    for figure in figures:
        for turn in range(given.rounds + 1):
            for program in started:
                rate = program.measure(figure)
                if turn:  # the first warms up, and compiles
                    rates[program.name][figure].append(rate)
    machine = {"instruction_set": instruction_set(), "threads": given.threads, "prompt": PREFILL}
    print(json.dumps(machine | {"read_gbps": round(read_bandwidth() / 1e9, 1)}))
    for name, found in rates.items():
        best = {
            figure: [max(both) for both in zip(*(rates[d][figure] for d in DENSE), strict=True)] for figure in figures
        }
        ratios = {
            f"{figure}, ratio": round(
                median(one / other for one, other in zip(found[figure], best[figure], strict=True)), 2
            )
            for figure in figures
        }
        print(
            json.dumps(
                {"name": name, "mb": megabytes(commands[name])}
                | {key: round(median(value), 1) for key, value in found.items()}
                | ratios
            )
        )


if __name__ == "__main__":
    main()
