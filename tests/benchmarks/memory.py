"""Memory of a run by the number of blocks: a sweep holds one block, so four times the blocks must not take more.

    python tests/benchmarks/memory.py [RECIPE.yaml...] [--blocks 4 16] [--hidden 1024]

Models of equal random blocks are saved in a temporary folder and compressed, each in a process of its own, by each
recipe (rtn and gptq if none is given) with its model, calibration and evaluation replaced by small ones. One JSON line
per model, then one with the ratio of the largest to the smallest model:

    recipe, blocks, model_mb, start_mb, compress_mb, finish_mb

Peaks of anonymous memory (RssAnon of /proc/self/status, so Linux only): pages of mapped files can be taken back by the
system and are not counted. start_mb: once everything is imported and the model is open; compress_mb: until the
checkpoint is on disk; finish_mb: while it is read back, compared and evaluated. The ratio is of what comes on top of
start_mb.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
INTERVAL_SECONDS = 0.005
VOCAB, TOKENS, SEQUENCES = 512, 128, 8


def main() -> None:
    arguments = parse()
    if arguments.one:
        print(json.dumps(measure(Path(arguments.one), arguments.recipes[0])))
        return
    recipes = arguments.recipes or [str(RECIPES / f"{name}.yaml") for name in ("rtn", "gptq")]
    with tempfile.TemporaryDirectory() as temporary:
        for count in arguments.blocks:
            build(Path(temporary) / str(count), count, arguments.hidden)
        for recipe in recipes:
            found = [run(Path(temporary) / str(count), recipe) for count in arguments.blocks]
            least, most = found[0], found[-1]
            ratios = {
                f"{phase}_ratio": round((most[f"{phase}_mb"] - most["start_mb"]) / (least[f"{phase}_mb"] - least["start_mb"]), 2)
                for phase in ("compress", "finish")
            }
            print(json.dumps({"recipe": Path(recipe).name, "blocks_ratio": most["blocks"] / least["blocks"], **ratios}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE.yaml")
    parser.add_argument("--blocks", type=int, nargs=2, default=(4, 16), metavar=("FEW", "MANY"))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def build(folder: Path, blocks: int, hidden: int) -> None:
    """A random Llama, with token ids for it beside it."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // 64,
        max_position_embeddings=TOKENS,
        bos_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    np.save(folder / "ids.npy", torch.randint(VOCAB, (SEQUENCES, TOKENS)).numpy())


def run(folder: Path, recipe: str) -> dict[str, float]:
    command = [sys.executable, __file__, recipe, "--one", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = done.stdout.strip().splitlines()[-1]
    print(line, flush=True)
    return json.loads(line)


def anonymous_mb() -> float:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no RssAnon; this benchmark needs Linux 4.5 or later")


class Peak:
    """The largest anonymous memory since the last look, sampled by a thread."""

    def __init__(self) -> None:
        self._most = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        wait = threading.Event()
        while True:
            self._most = max(self._most, anonymous_mb())
            wait.wait(INTERVAL_SECONDS)

    def take(self) -> float:
        most, self._most = max(self._most, anonymous_mb()), 0.0
        return round(most, 1)


def measure(folder: Path, path: str) -> dict[str, object]:
    import compress
    from compress.journal import Journal
    from compress.runner import Job

    ids, recipe = str(folder / "ids.npy"), compress.Recipe.from_yaml(path)
    calibration = compress.Calibration(source=ids, sequences=None, length=None)
    evaluation = compress.Evaluate(perplexity=(ids,), windows=2, length=None)
    changes = {"model": str(folder), "calibration": calibration, "eval": evaluation}
    with tempfile.TemporaryDirectory() as out:
        job = Job.begin(recipe.model_copy(update=changes), Path(out), overwrite=False, journal=Journal())
        start, peak = anonymous_mb(), Peak()
        job.compress()
        compressing = peak.take()
        job.finish()
        size = (folder / "model.safetensors").stat().st_size / 2**20
    return {
        "recipe": Path(path).name,
        "blocks": int(folder.name),
        "model_mb": round(size, 1),
        "start_mb": round(start, 1),
        "compress_mb": compressing,
        "finish_mb": peak.take(),
    }


if __name__ == "__main__":
    main()
