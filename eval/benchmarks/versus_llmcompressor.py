"""Recipes of ours and a method of llm-compressor or AutoRound, in turns on the same token ids in one run.

    python eval/benchmarks/versus_llmcompressor.py RECIPE.yaml --method gptq --peer-python ENV/bin/python \
        --model FOLDER --test IDS.npy --calibration IDS.npy [--threads 1] [--rounds 1]

Both live in an environment of their own (pip install torch==2.13.0 llmcompressor, which brings auto-round); FOLDER is a
local model in float32. Their seconds are those of the method on the loaded model, without writing anything; ours are
from opening the model to the complete checkpoint on disk. Prints one JSON line per run and one with the ratios (ours /
theirs).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
METHODS = ("rtn", "gptq", "gptq_noact", "wanda", "autoround")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--method", choices=METHODS, required=True, help="gptq: in the default order, static")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    needed = "auto_round" if arguments.method == "autoround" else "llmcompressor"
    if subprocess.run([arguments.peer_python, "-c", f"import {needed}"], capture_output=True, check=False).returncode:
        sys.exit(f"this benchmark needs a Python with {needed}; pip install it, and give --peer-python PATH")
    pairs = [(ours(arguments), theirs(arguments)) for _ in range(arguments.rounds)]
    ratio = {
        "seconds_ratio": round(median(a["seconds"] / b["seconds"] for a, b in pairs), 3),
        "peak_rss_ratio": round(median(a["peak_rss_mb"] / b["peak_rss_mb"] for a, b in pairs), 3),
        "perplexities": [round(median(row["perplexity"] for row in side), 3) for side in zip(*pairs, strict=True)],
    }
    print(json.dumps(ratio))


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    script = [sys.executable, str(HERE / "quality.py"), arguments.recipe, "--threads", str(arguments.threads)]
    return record("compress", [*script, *protocol(arguments)], arguments.threads)


def theirs(arguments: argparse.Namespace) -> dict[str, Any]:
    script = [arguments.peer_python, str(HERE / "peer_llmcompressor.py"), arguments.method]
    tool = "AutoRound" if arguments.method == "autoround" else "llm-compressor"
    return record(tool, [*script, *protocol(arguments)], arguments.threads)


def protocol(arguments: argparse.Namespace) -> list[str]:
    return [f"--{name}={getattr(arguments, name)}" for name in ("model", "test", "calibration")]


def record(tool: str, command: list[str], threads: int) -> dict[str, Any]:
    """The last line that a command prints, as JSON; shown, too."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    row = {"tool": tool, **json.loads(done.stdout.strip().splitlines()[-1])}
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
