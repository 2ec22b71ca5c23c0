"""Quality, time and memory of recipes on a fixed protocol: windows and calibration sequences given as token ids.

    python eval/benchmarks/quality.py RECIPE.yaml... --model PATH --test IDS.npy --calibration IDS.npy [--also embedded]

Each recipe is run with its model and calibration replaced by the given ones, in a process of its own; the reloaded
checkpoint is evaluated on the windows. One JSON line per recipe:

    recipe, perplexity, loss, base_loss, kl, kl_stderr, kl_by_position, seconds, peak_rss_mb, checkpoint_bytes,
    bits_per_weight, verify_seconds

kl: of the uncompressed next-token distribution to the checkpoint's, nats per token, with its standard error over windows;
kl_by_position: [first position, last position, KL] of each part of a window.
A recipe with `self_share` samples that share of the calibration from the model; the given sequences are the rest.
--sequences: of the calibration, sampled ones included; without it as many as there are in the file. With a recipe of
`self_share: 0.75`, `--sequences 64` reads 16 sequences of the file and samples 48.

--also: a second text, of another kind than the calibration's, in windows of the same number and length; the line ends
with its perplexity, base_perplexity, KL, and difference of the loss from the base's with the standard error over windows.

seconds: from opening the model to the complete checkpoint on disk; peak_rss_mb: of the process until then. Reading the
checkpoint back and comparing it (verify_seconds) and the evaluation come after. The calibration's batch stays the
recipe's.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

KEYS = (
    "recipe",
    "perplexity",
    "loss",
    "base_loss",
    "kl",
    "kl_stderr",
    "kl_by_position",
    "seconds",
    "peak_rss_mb",
    "checkpoint_bytes",
    "bits_per_weight",
    "verify_seconds",
)


def main() -> None:
    arguments = parse()
    if arguments.one:
        print(json.dumps(measure(arguments, arguments.recipes[0])))
        return
    done = [run(recipe, forwarded(arguments)) for recipe in arguments.recipes]
    sys.exit(not all(done))


def run(recipe: str, options: list[str]) -> bool:
    """Measure a recipe in a process of its own and print its line; returns whether that went well."""
    command = [sys.executable, __file__, "--one", recipe, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"{recipe}: failed", flush=True)
    return done.returncode == 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE.yaml")
    parser.add_argument("--model", required=True, help="hub id, local folder or .gguf file")
    parser.add_argument("--test", required=True, help="token ids of the windows, .npy [windows, length]")
    parser.add_argument("--calibration", required=True, help="token ids, .npy [sequences, length]")
    parser.add_argument("--sequences", type=int, help="of the calibration; those of the file if not given")
    parser.add_argument("--also", metavar="TEXT", help="a second text: embedded, a file, ...")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, help="threads of torch; all cores if not given")
    parser.add_argument("--out", help="keep the checkpoints in this folder")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def forwarded(arguments: argparse.Namespace) -> list[str]:
    names = ("model", "test", "calibration", "also", "dtype", "threads", "out", "sequences")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def measure(arguments: argparse.Namespace, path: str) -> dict[str, object]:
    import numpy
    import torch

    import compress
    from compress.passes.contract.journal import Journal
    from compress.pipeline.finish import finish
    from compress.pipeline.prepare import prepare
    from compress.pipeline.run import compress as work

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    recipe = compress.Recipe.from_yaml(path)
    sequences, tokens = numpy.load(arguments.calibration, mmap_mode="r").shape
    ids = {"source": arguments.calibration, "sequences": arguments.sequences or sequences, "length": tokens}
    windows, length = numpy.load(arguments.test, mmap_mode="r").shape
    texts = (arguments.test,) if arguments.also is None else (arguments.test, arguments.also)
    recipe = recipe.model_copy(
        update={
            "model": arguments.model,
            "dtype": arguments.dtype,
            "calibration": recipe.calibration.model_copy(update=ids),
            "eval": compress.Evaluate(perplexity=texts, windows=windows, length=length),
        }
    )
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(arguments.out or temporary) / Path(path).stem
        begin = perf_counter()
        job = prepare(recipe, out, overwrite=True, journal=Journal())
        work(job)
        seconds = perf_counter() - begin
        shared_absmax = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report = finish(job).report
    quality, size = report["perplexity"][0], report["size"]
    values = (
        Path(path).name,
        quality["compressed"]["perplexity"],
        quality["compressed"]["loss"],
        quality["base"]["loss"],
        quality["divergence"]["mean"],
        quality["divergence"]["stderr"],
        [[part["first"], part["last"], round(part["kl"], 4)] for part in quality["divergence"]["by_position"]],
        round(seconds, 1),
        round(shared_absmax),
        size["checkpoint_bytes"],
        round(size["bits_per_weight"], 4),
        round(report["costs"]["verify"]["seconds"], 1),
    )
    line: dict[str, object] = dict(zip(KEYS, values, strict=True))
    return line if arguments.also is None else line | {"also": second(report["perplexity"][1])}


def second(row: dict[str, Any]) -> dict[str, float]:
    """What a line says of the second text, from the row of the report."""
    found = {"perplexity": row["compressed"]["perplexity"], "base_perplexity": row["base"]["perplexity"]}
    paired = row["difference"]
    divergence = {"kl": row["divergence"]["mean"], "kl_stderr": row["divergence"]["stderr"]}
    return found | divergence | {"difference": paired["loss"], "difference_stderr": paired["stderr"]}


if __name__ == "__main__":
    main()
