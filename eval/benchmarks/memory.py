"""Memory of a run by the number of blocks, compared with the prediction of `compress plan`.

    python eval/benchmarks/memory.py [RECIPE.yaml...] [--blocks 4 16] [--hidden 1024]
    python eval/benchmarks/memory.py [NAME...] --planned [--blocks 4 8] [--hidden 512] [--sequences 16]
    python eval/benchmarks/memory.py gptq wanda awq --planned --blocks 1 --experts 256 [--memory 900MB] [--processes 2]
    python eval/benchmarks/memory.py --table

A sweep holds one block, so four times the blocks must not take more.

Models of equal random blocks are saved in a temporary folder and compressed, each in a process of its own, by each
recipe (rtn and gptq if none is given) with its model, calibration and evaluation replaced by small ones. One JSON line
per model, then one with the ratio of the largest to the smallest model:

    recipe, blocks, model_mb, start_mb, compress_mb, finish_mb

Peaks of anonymous memory (RssAnon of /proc/self/status, so Linux only): pages of mapped files can be taken back by the
system and are not counted. start_mb: once everything is imported and the model is open; compress_mb: until the
checkpoint is on disk; finish_mb: while it is read back, compared and evaluated. The ratio is of what comes on top of
start_mb.

With --planned, the recipes of PLANNED (all, or those that are named) instead, and one JSON line per recipe and model:

    recipe, blocks, weights_mb, planned_mb, measured_mb, ratio

measured_mb: the peak of the whole run on top of what the process holds when it has run the same passes on a far smaller
model, so that libraries and all that they import late are apart. The allocator of glibc keeps large pieces of what was
freed, up to as much again, and MKL keeps a buffer of some MB for each shape of products; --planned asks them not to
(MALLOC_MMAP_THRESHOLD_, MKL_DISABLE_FAST_MM), since plans are of tensors. With --allocator default they do as they
always do. --experts: mixtures of so many experts, half as wide as the hidden states,
8 of them for each token. --ffn, --kv-heads, --head-dim: other proportions of the blocks. --memory: the option of
`compress run`.

--processes N: each run also in N processes that divide it, as torchrun starts them, in a line of its own:

    recipe, blocks, processes, planned_mb, measured_mb, largest_mb, of_one

measured_mb: of each process. largest_mb: the largest of them. of_one: largest_mb relative to that of one process.

With --table, the recipes of TABLE on the models of SHAPES, as a table in Markdown.

Checkpoints are verified by their own reader (`verify: own`); transformers reads a second copy of the model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

RECIPES = Path(__file__).parents[2] / "recipes"
INTERVAL_SECONDS = 0.005
VOCAB, TOKENS, SEQUENCES = 512, 128, 8
PLANNED_VOCAB, PLANNED_TOKENS, SMALL = 4096, 256, 128
LEARNED = {"train": ["scales", "norms"], "steps": 4}
W8A8 = {"weights": "int8", "group_size": "channel", "activations": "int8"}
PLANNED = {
    "rtn": [{"rtn": {}}],
    "gptq": [{"gptq": {}}],
    "gptq-asymmetric": [{"gptq": {"error": "asymmetric"}}],
    "awq": [{"awq": {}}, {"rtn": {}}],
    "wanda": [{"wanda": {}}],
    "wanda-unrepaired": [{"wanda": {"repair": 0}}],
    "signround": [{"signround": {"iterations": 5}}],
    "lkd": [{"rtn": {}}, {"lkd": LEARNED}],
    "lkd-weights": [{"wanda": {}}, {"lkd": {"steps": 4}}],
    "distill": [{"rtn": {}}, {"distill": LEARNED}],
    "smoothquant": [{"smoothquant": {}}, {"rtn": W8A8}],
    "smoothquant-gptq": [{"smoothquant": {}}, {"gptq": {"weights": "int8", "group_size": "channel"}}],
    "outlier_suppression": [{"outlier_suppression": {"steps": 1}}, {"rtn": W8A8}],
    "sparsegpt": [{"sparsegpt": {}}],
    "hqq": [{"hqq": {}}],
    "finetune": [{"wanda": {}}, {"finetune": {"steps": 4}}],
    "magnitude-global": [{"magnitude": {"allocate": "global"}}],
    "drop_blocks": [{"drop_blocks": {"count": 1}}],
    "drop_blocks-loss": [{"drop_blocks": {"count": 1, "by": "loss"}}],
    "narrow": [{"narrow": {"ffn": 0.25}}],
    "narrow-hidden": [{"narrow": {"hidden": 0.25}}],
}
"""Passes by the name of their line."""
TABLE = ("rtn", "gptq", "awq", "wanda", "sparsegpt", "smoothquant", "signround")
SHAPES = {
    "70B, a sixteenth of each width": {"hidden": 512, "ffn": 1792, "kv_heads": 1},
    "256 experts": {"hidden": 256, "experts": 256},
}
"""Options of models of one block by their name in the table."""


def main() -> None:
    arguments = parse()
    if arguments.table:
        print_table(arguments)
        return
    if arguments.planned:
        against_plans(arguments)
        return
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
                f"{phase}_ratio": round(
                    (most[f"{phase}_mb"] - most["start_mb"]) / (least[f"{phase}_mb"] - least["start_mb"]), 2
                )
                for phase in ("compress", "finish")
            }
            print(json.dumps({"recipe": Path(recipe).name, "blocks_ratio": most["blocks"] / least["blocks"], **ratios}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE.yaml")
    parser.add_argument("--blocks", type=int, nargs="+", help="of the models, from few to many")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--planned", action="store_true", help="compare with the prediction of the plan")
    parser.add_argument("--sequences", type=int, default=16, help=f"with --planned: of {PLANNED_TOKENS} tokens")
    parser.add_argument(
        "--dtype", default="auto", help="with --planned: what the model, stored in float32, computes in"
    )
    parser.add_argument("--experts", type=int, default=0, help="with --planned: of each block")
    parser.add_argument("--ffn", type=int, help="channels inside of the FFN; twice the hidden ones by default")
    parser.add_argument("--kv-heads", type=int, help="heads of keys and values; as many as those of queries by default")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--memory", help="with --planned: the limit of the run")
    parser.add_argument("--processes", type=int, default=1, help="with --planned: also measure so many that divide it")
    parser.add_argument("--allocator", choices=("exact", "default"), default="exact", help="with --planned")
    parser.add_argument("--table", action="store_true", help="compare the plans of several recipes and models")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    found = parser.parse_args()
    found.blocks = found.blocks or ((4, 8) if found.planned else (4, 16))
    found.hidden = found.hidden or (512 if found.planned else 1024)
    return found


def print_table(arguments: argparse.Namespace) -> None:
    """Print one row per recipe with the plan and the measured peak of each model."""
    rows: dict[str, list[str]] = {name: [] for name in arguments.recipes or TABLE}
    for sizes in SHAPES.values():
        options = vars(arguments) | {"table": False, "planned": True, "blocks": (1,), "recipes": list(rows)} | sizes
        for line in against_plans(argparse.Namespace(**options)):
            rows[line["recipe"]] += [f"{line[name]}" for name in ("planned_mb", "measured_mb", "ratio")]
    print("| recipe |" + "".join(f" {name}: planned | measured | ratio |" for name in SHAPES))
    print("|---" * (1 + 3 * len(SHAPES)) + "|")
    for name, cells in rows.items():
        print(f"| `{name}` | {' | '.join(cells)} |")


def against_plans(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return one line per recipe and model."""
    if arguments.one:
        folder, name = Path(arguments.one), arguments.recipes[0]
        print(json.dumps(beside_plan(folder, name, arguments)), flush=True)
        return []
    lines: list[dict[str, Any]] = []
    environment = dict(os.environ)
    if arguments.allocator == "exact":
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "MKL_DISABLE_FAST_MM": "1"}
    options = ["--planned", "--dtype", arguments.dtype]
    options += ["--memory", arguments.memory] if arguments.memory else []
    options += ["--processes", str(arguments.processes)]
    with tempfile.TemporaryDirectory() as temporary:
        build(Path(temporary) / "small", 2, SMALL, PLANNED_VOCAB // 16, 16, arguments.sequences)
        for count in arguments.blocks:
            size = (arguments.hidden, PLANNED_VOCAB, PLANNED_TOKENS, arguments.sequences, arguments.experts)
            shape = {"ffn": arguments.ffn, "kv_heads": arguments.kv_heads, "head_dim": arguments.head_dim}
            build(Path(temporary) / str(count), count, *size, **shape)
            for name in arguments.recipes or PLANNED:
                alone = run(Path(temporary) / str(count), name, *options, environment=environment)
                lines.append(alone)
                if arguments.processes > 1:
                    in_processes(Path(temporary) / str(count), name, arguments.processes, options, environment, alone)
    return lines


def in_processes(
    folder: Path,
    name: str,
    processes: int,
    options: list[str],
    environment: dict[str, str],
    alone: dict[str, float],
) -> None:
    """One line for the processes that divide a run. alone: the line of one process."""
    from launching import ranks

    command = [sys.executable, __file__, name, "--one", str(folder), *options]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**environment, **variables})
        for variables in ranks(processes)
    ]
    with ThreadPoolExecutor(processes) as readers:
        lines = list(readers.map(lambda process: process.communicate()[0], started))
    if any(process.returncode for process in started):
        raise SystemExit(f"{name}: a process of {processes} failed")
    measured = [json.loads(line.strip().splitlines()[-1])["measured_mb"] for line in lines]
    figures = {
        "planned_mb": alone["planned_mb"],
        "measured_mb": measured,
        "largest_mb": max(measured),
        "of_one": round(max(measured) / alone["measured_mb"], 2),
    }
    print(json.dumps({"recipe": name, "blocks": int(folder.name), "processes": processes, **figures}), flush=True)


def beside_plan(folder: Path, name: str, arguments: argparse.Namespace) -> dict[str, object]:
    """The plan and the peak of one recipe, after a run on the small model; files go next to the folder."""
    run_all(folder.parent / "small", name, arguments, None)
    gc.collect()
    start, peak = anonymous_mb(), Peak()
    planned = run_all(folder, name, arguments, arguments.memory) / 2**20
    measured = peak.take() - start
    figures = {
        "weights_mb": round((folder / "model.safetensors").stat().st_size / 2**20, 1),
        "planned_mb": round(planned, 1),
        "measured_mb": round(measured, 1),
        "ratio": round(planned / measured, 2),
    }
    return {"recipe": name, "blocks": int(folder.name), **figures}


def run_all(folder: Path, name: str, arguments: argparse.Namespace, memory: str | None) -> int:
    """Compress, check and evaluate; the bytes that the plan predicts, 0 in processes without a report."""
    import compress

    ids = str(folder / "ids.npy")
    recipe = compress.Recipe.model_validate(
        {
            "model": str(folder),
            "dtype": arguments.dtype,
            "calibration": {"source": ids, "sequences": None, "length": None},
            "passes": PLANNED[name],
            "eval": {"perplexity": [ids], "windows": 2, "length": None},
            "save": {"verify": "own"},
        }
    )
    launch = os.environ.get("MASTER_PORT")  # the processes of a launch share the folder
    shared = None if launch is None else folder.parent / f"{folder.name}-{name}-{launch}"
    with nullcontext(shared) if shared else tempfile.TemporaryDirectory() as out:
        report = compress.run(recipe, out, memory=memory).report
    return report["predicted"]["memory_bytes"] if report else 0


def build(
    folder: Path,
    blocks: int,
    hidden: int,
    vocabulary: int = VOCAB,
    tokens: int = TOKENS,
    sequences: int = SEQUENCES,
    experts: int = 0,
    *,
    ffn: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = 64,
) -> None:
    """A random Llama, or a mixture of experts, with token ids for it in the same folder."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    torch.manual_seed(0)
    mixed = {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": hidden // 2}
    config = (Qwen3MoeConfig if experts else LlamaConfig)(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn or 2 * hidden,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=kv_heads or hidden // head_dim,
        head_dim=head_dim,
        max_position_embeddings=tokens,
        bos_token_id=0,
        eos_token_id=1,
        **(mixed if experts else {}),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    np.save(folder / "ids.npy", torch.randint(vocabulary, (sequences, tokens)).numpy())


def run(folder: Path, recipe: str, *options: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    command = [sys.executable, __file__, recipe, "--one", str(folder), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
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
    from compress.passes.contract.journal import Journal
    from compress.pipeline.finish import finish
    from compress.pipeline.prepare import prepare
    from compress.pipeline.run import compress as work

    ids, recipe = str(folder / "ids.npy"), compress.Recipe.from_yaml(path)
    calibration = compress.Calibration(source=ids, sequences=None, length=None)
    evaluation = compress.Evaluate(perplexity=(ids,), windows=2, length=None)
    changes = {"model": str(folder), "calibration": calibration, "eval": evaluation}
    with tempfile.TemporaryDirectory() as out:
        job = prepare(recipe.model_copy(update=changes), Path(out), overwrite=False, journal=Journal())
        start, peak = anonymous_mb(), Peak()
        work(job)
        compressing = peak.take()
        finish(job)
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
