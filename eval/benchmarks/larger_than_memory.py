"""Compress a model that is larger than the memory that a process may have, evaluate it, and reload it.

    python eval/benchmarks/larger_than_memory.py [gptq wanda-gptq] [--limit-mb 3000] [--model-mb 4500] [--markdown]
    python eval/benchmarks/larger_than_memory.py [gptq] --cold --compare    # with and without reading ahead

A Llama of random weights in bfloat16 is written in shards to a temporary folder (--folder: elsewhere, kept). Each
recipe is run by `compress run` in a process of its own whose RLIMIT_DATA is the limit: the system refuses it any more
private memory, anonymous or mapped for writing. `compress eval` of the packed checkpoint runs in another process under
the same limit, and finds the same perplexity (reloaded). Each process has one thread. One JSON line per recipe:

    recipe, model_mb, limit_mb, stored_mb, block_mb, activations_mb, bound_mb, peak_mb, reload_mb, planned_mb, seconds,
    reading_seconds, read_mb, perplexity, reloaded

peak_mb, reload_mb: the peak of RssAnon of /proc/PID/status (Linux only), sampled from outside. bound_mb: two blocks, the
activations and 600 MB for libraries and the statistics and solution of one layer. The activations: a store of one batch of
all calibration tokens, and what all batches hold while they wait inside of a block. reading_seconds: time in which the
run waited for pages of the model, which it reads twice: for the passes, and to evaluate it. --cold drops the files from
the page cache before each run; --compare repeats each recipe without asking for the pages of the next block early.

The recipe has `save: {verify: own}`, since transformers would read back the whole dense model. The page cache is outside
of the limit: the system can take its pages back at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import random_llama

MB = 10**6
LIBRARIES_MB = 600
INTERVAL_SECONDS = 0.005
PAPER = {"act_order": "none", "scale": "absmax", "refine": 0}
RECIPES = {
    "gptq": [{"gptq": {}}],
    "wanda-gptq": [{"wanda": {"pattern": "2:4"}}, {"gptq": {}}],
    "rtn": [{"rtn": {}}],
    "gptq-paper": [{"gptq": PAPER}],
    "wanda-gptq-paper": [{"wanda": {"pattern": "2:4", "repair": 0}}, {"gptq": PAPER}],
}
"""Passes by the name of their line; those of the papers take a third of the time."""


def main() -> None:
    arguments = parse()
    place = nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory()
    with place as folder:
        model = Path(folder) / "model"
        if not (model / "config.json").exists():
            build(model, arguments)
        lines = [
            measure(model, name, arguments, ahead)
            for name in arguments.recipes or ("gptq", "wanda-gptq")
            for ahead in ((True, False) if arguments.compare else (True,))
        ]
    if arguments.markdown:
        print(markdown(lines))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; default: the first two")
    parser.add_argument("--limit-mb", type=int, default=3000)
    parser.add_argument("--model-mb", type=int, help="default: 1.5 times the limit")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--shard-mb", type=int, default=500)
    parser.add_argument("--folder", help="for the model, kept and used again, and for runs, continued if interrupted")
    parser.add_argument("--cold", action="store_true", help="drop the model from the page cache before each run")
    parser.add_argument("--compare", action="store_true", help="also run without asking for pages early")
    parser.add_argument("--memory", help="the option of compress run; default: the limit; none: without it")
    parser.add_argument("--markdown", action="store_true", help="also print a table")
    found = parser.parse_args()
    found.model_mb = found.model_mb or found.limit_mb * 3 // 2
    return found


def block_numbers(arguments: argparse.Namespace) -> int:
    """The number of weights of a block."""
    return 4 * arguments.hidden**2 + 3 * arguments.hidden * arguments.intermediate + 2 * arguments.hidden


def build(folder: Path, arguments: argparse.Namespace) -> None:
    """Write a Llama of random weights of about the size that is asked for."""
    ends = 2 * arguments.vocabulary * arguments.hidden
    blocks = round((arguments.model_mb * MB / 2 - ends) / block_numbers(arguments))
    shape = {
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.intermediate,
        "num_hidden_layers": max(blocks, 1),
        "num_attention_heads": arguments.hidden // 64,
        "max_position_embeddings": arguments.length,
    }
    random_llama.write(folder, shape, (arguments.sequences, arguments.length), arguments.shard_mb * MB)


def measure(model: Path, name: str, arguments: argparse.Namespace, ahead: bool) -> dict[str, Any]:
    """Run one recipe and reload its checkpoint, each in a limited process; print and return its line."""
    limit, ids = arguments.limit_mb * MB, str(model / "ids.npy")
    recipe = {
        "model": str(model),
        "calibration": {"source": ids, "sequences": None, "length": None, "batch": 1},
        "passes": RECIPES[name],
        "save": {"verify": "own"},
        "eval": {"perplexity": [ids], "windows": 2, "length": None},
    }
    path, out = model.parent / f"{name}.yaml", model.parent / name
    path.write_text(json.dumps(recipe))  # JSON is YAML
    with removed(out):
        if arguments.cold:
            drop_pages(model)
        memory = [] if arguments.memory == "none" else ["--memory", arguments.memory or f"{arguments.limit_mb}MB"]
        begin = time.monotonic()
        report, peak = limited(limit, ["run", str(path), "-o", str(out), "--json", *memory], ahead)
        seconds = time.monotonic() - begin
        again, reloaded = limited(
            limit,
            ["eval", str(out), "--text", ids, "--windows", "2", "--length", str(arguments.length), "--json"],
            True,
        )
        stored_mb = sum(file.stat().st_size for file in out.glob("*.safetensors")) / MB
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / MB
    line = {
        "recipe": name,
        **({"cold": arguments.cold, "ahead": ahead} if arguments.cold or arguments.compare else {}),
        "model_mb": round(size),
        "limit_mb": arguments.limit_mb,
        "stored_mb": round(stored_mb),
        "block_mb": round(2 * block_numbers(arguments) / MB, 1),
        "activations_mb": round(activation_bytes(arguments) / MB, 1),
        "bound_mb": round((4 * block_numbers(arguments) + activation_bytes(arguments)) / MB + LIBRARIES_MB),
        "peak_mb": round(peak / MB),
        "reload_mb": round(reloaded / MB),
        "planned_mb": round(report["predicted"]["memory_bytes"] / MB),
        "seconds": round(seconds),
        "reading_seconds": round(report["reading"]["seconds"], 1),
        "read_mb": round(report["reading"]["size_bytes"] / MB),
        "perplexity": round(perplexities(report)[-1], 3),
        "reloaded": round(perplexities(again)[-1], 3),
    }
    print(json.dumps(line), flush=True)
    return line


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    """Remove a folder when the context is left without an error; a run that was interrupted is continued."""
    yield
    shutil.rmtree(folder)


def activation_bytes(arguments: argparse.Namespace) -> int:
    """The store between blocks, and what all batches hold while they wait inside of a block."""
    tokens = arguments.sequences * arguments.length
    return 2 * tokens * (arguments.hidden + 3 * arguments.hidden + arguments.intermediate)


def perplexities(values: Any) -> list[float]:
    """All perplexities of a report or of an evaluation, in their order: base model first."""
    if isinstance(values, list):
        return [found for value in values for found in perplexities(value)]
    if not isinstance(values, dict):
        return []
    own = values.get("perplexity")
    return [own] if isinstance(own, float) else [found for value in values.values() for found in perplexities(value)]


def limited(limit: int, command: list[str], ahead: bool) -> tuple[dict[str, Any], int]:
    """What a command of `compress` prints as JSON, and its peak of anonymous memory, under RLIMIT_DATA."""
    code = "" if ahead else "import os; del os.posix_fadvise; "  # what asks the system for pages
    code += "from compress.cli import main; main()"
    started = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # with two, the evaluation takes more memory
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    with watched(started.pid) as peak:
        printed, _ = started.communicate()
    if started.returncode:
        raise SystemExit(f"compress {' '.join(command)} ended with {started.returncode}")
    return json.loads(printed), peak[0]


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """The peak of anonymous memory of a process in bytes, in a list of one number, while the context is open."""
    import threading

    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL_SECONDS):
            peak[0] = max(peak[0], anonymous_bytes(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def drop_pages(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def markdown(lines: list[dict[str, Any]]) -> str:
    """The lines as a table."""
    head = list(lines[0])
    rows = [head, ["---"] * len(head), *([str(line[name]) for name in head] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
