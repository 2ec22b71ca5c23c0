"""Seconds, peak memory and output error of passes on one block of the width of models that people compress.

    python eval/benchmarks/wide.py --folder DIR [SHAPE...] [--passes NAME...] [--memory 9] [--threads 2] [--sequences 8] \
        [--length 256] [--divide 1] [--peer-python ENV/bin/python]

SHAPE: a name of SHAPES; all by default. NAME: one of PASSES, or a recipe in recipes/, whose passes are run; by default
PASSES, then each other pass by the recipe of its name. The weights are random, the vocabulary has 1,024 tokens. Each
pass runs in a separate process, which may take --memory GB (RLIMIT_DATA). DIR holds the models and, for each pass, a file with its
figures: the same command continues after a crash, and runs nothing again. --divide makes every width smaller.
--peer-python: a Python with llm-compressor, whose methods of the same kind are run on the same model (peer_wide.py); it
may take any memory.

Prints a table: seconds and CPU seconds from opening the model to the checkpoint on disk, the peak of the process
(ru_maxrss) in MB, and the relative error of the block's output on as many other sequences; none where a pass rotates
or cuts the hidden states, so that the block has other inputs. The seconds of the peer are
those of its method on the loaded model, without writing anything.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import random_llama

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
SHAPES: dict[str, dict[str, int]] = {
    "llama-3-8b": {"hidden_size": 4096, "intermediate_size": 14336, **HEADS},
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "gemma-2-9b": {
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 14,
        "num_key_value_heads": 7,
    },
    "qwen3-30b-a3b": {"hidden_size": 2048, "intermediate_size": 6144, **HEADS, **EXPERTS},
}
"""Widths of one block; the last one has experts."""
PASSES: dict[str, list[dict[str, Any]]] = {
    "rtn": [{"rtn": {}}],
    "gptq": [{"gptq": {}}],
    "gptq-unrefined": [{"gptq": {"refine": 0}}],
    "wanda-2:4": [{"wanda": {"pattern": "2:4"}}],
    "wanda-2:4-paper": [{"wanda": {"pattern": "2:4", "repair": 0}}],
    "sparsegpt-2:4": [{"sparsegpt": {"pattern": "2:4"}}],
    "sparsegpt-2:4-paper": [{"sparsegpt": {"pattern": "2:4", "repair": 0, "shrinkage": 0}}],
    "awq": [{"awq": {}}, {"rtn": {}}],
    "smoothquant": [{"smoothquant": {}}, {"rtn": {"weights": "int8", "group_size": "channel", "activations": "int8"}}],
    "llm_int8": [{"llm_int8": {}}],
    "owq": [{"owq": {}}],
    "spqr": [{"spqr": {}}],
    "signround": [{"signround": {"iterations": 20}}],
}
"""Passes by the name of their line."""
RECIPES = Path(__file__).parents[2] / "recipes"
OF_WHOLE_MODELS = {"drop_blocks"}
"""Passes that one block is too small for."""
OF_MIXTURES = {"drop_experts"}
PEER: dict[str, str] = {
    "rtn": "rtn",
    "gptq": "gptq",
    "gptq-unrefined": "gptq-no-order",
    "wanda-2:4": "wanda-2:4",
    "sparsegpt-2:4": "sparsegpt-2:4",
    "awq": "awq",
}
"""Methods of peer_wide.py by the pass that they are compared with."""
VOCABULARY = 1024
DIVIDED = ("_size", "_heads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", default=list(SHAPES))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--passes", nargs="+", metavar="NAME")
    for name, value in (("memory", 9.0), ("threads", 2), ("sequences", 8), ("length", 256), ("divide", 1)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--peer-python", metavar="PATH")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.shapes) - set(SHAPES)
    if unknown:
        parser.error(f"no shape is called {', '.join(sorted(unknown))}; known: {', '.join(SHAPES)}")
    if arguments.one:
        (shape,), (name,) = arguments.shapes, arguments.passes
        print(json.dumps(measured(model_of(arguments, shape), name, arguments)))
        return
    print("| shape | pass | seconds | CPU seconds | peak MB | output error |\n|---|---|---|---|---|---|")
    for shape in arguments.shapes:
        model_of(arguments, shape)
        for name in arguments.passes or names_for(shape):
            print(line(shape, name, figures(arguments, shape, name)), flush=True)
            if arguments.peer_python and name in PEER:
                print(line(shape, f"llm-compressor {PEER[name]}", of_peer(arguments, shape, PEER[name])), flush=True)


def names_for(shape: str) -> list[str]:
    """The rows of a shape: PASSES, and each pass without a row there by the recipe of its name."""
    import compress

    left_out = OF_WHOLE_MODELS | (set() if "num_experts" in SHAPES[shape] else OF_MIXTURES)
    rows = {next(iter(step)) for steps in PASSES.values() for step in steps}
    return [*PASSES, *sorted(set(compress.PASSES) - rows - left_out)]


def passes_of(name: str) -> list[dict[str, Any]]:
    """The passes of a row, as a recipe states them."""
    if name in PASSES:
        return PASSES[name]
    import yaml

    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["passes"]


def model_of(arguments: argparse.Namespace, shape: str) -> Path:
    """The folder of the model of a shape, which is written unless it is complete."""
    folder = arguments.folder / f"{shape}-{arguments.divide}-{arguments.sequences}x{arguments.length}"
    if not (folder / "config.json").exists():
        widths = {
            n: max(1, size // arguments.divide) if n.endswith(DIVIDED) else size for n, size in SHAPES[shape].items()
        }
        config = {
            "vocab_size": VOCABULARY,
            "num_hidden_layers": 1,
            "max_position_embeddings": arguments.length,
        } | widths
        kind = "Qwen3MoeConfig" if "num_experts" in config else "LlamaConfig"
        random_llama.write(folder, config, (2 * arguments.sequences, arguments.length), 1 << 30, kind=kind)
    return folder


def figures(arguments: argparse.Namespace, shape: str, name: str) -> dict[str, Any]:
    """The figures of a pass: those that are kept, or new ones."""
    options = [f"--{n}={getattr(arguments, n)}" for n in ("memory", "threads", "sequences", "length", "divide")]
    command = [sys.executable, __file__, shape, "--one", f"--folder={arguments.folder}", *options, "--passes", name]
    return run_once(model_of(arguments, shape) / f"{name.replace(':', '-')}.json", command, arguments.threads)


def of_peer(arguments: argparse.Namespace, shape: str, method: str) -> dict[str, Any]:
    """The figures of a method of llm-compressor: those that are kept, or new ones."""
    model = model_of(arguments, shape)
    command = [arguments.peer_python, str(Path(__file__).parent / "peer_wide.py"), method, f"--model={model}"]
    command += [f"--{n}={getattr(arguments, n)}" for n in ("threads", "sequences")]
    return run_once(model / f"llm-compressor-{method.replace(':', '-')}.json", command, arguments.threads)


def run_once(kept: Path, command: list[str], threads: int) -> dict[str, Any]:
    """The figures that a command prints in its last line, which are kept in a file."""
    if kept.exists():
        return json.loads(kept.read_text())
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    kept.write_text(done.stdout.strip().splitlines()[-1])
    return json.loads(kept.read_text())


def line(shape: str, name: str, row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"| {shape} | {name} | {row['failed']} | | | |"
    seconds, processor_seconds, peak = (row[n] for n in ("seconds", "processor_seconds", "peak_mb"))
    error = "" if row["output_error"] is None else f"{row['output_error']:.4f}"
    return f"| {shape} | {name} | {seconds:.1f} | {processor_seconds:.1f} | {peak:.0f} | {error} |"


def measured(model: Path, name: str, arguments: argparse.Namespace) -> dict[str, float | None]:
    """Compress the model in this process, and compare the outputs."""
    limit = int(arguments.memory * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import numpy as np
    import torch

    import compress

    torch.set_num_threads(arguments.threads)
    ids = np.load(model / "ids.npy")
    calibration, test = model / f"{name.replace(':', '-')}-ids.npy", torch.from_numpy(ids[arguments.sequences :])
    np.save(calibration, ids[: arguments.sequences])
    recipe = compress.Recipe.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "calibration": {"source": str(calibration), "sequences": None, "length": None},
            "passes": passes_of(name),
            "eval": None,
            "save": {"format": "native", "verify": "own"},
        }
    )
    out, start, before = (
        model / f"{name.replace(':', '-')}-out",
        perf_counter(),
        resource.getrusage(resource.RUSAGE_SELF),
    )
    shutil.rmtree(out, ignore_errors=True)  # a run that was killed would be continued
    compress.run(recipe, out, progress=False)
    seconds, after = perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_mb": after.ru_maxrss / 1024,
        "output_error": output_error(model, out, test),
    }


def output_error(model: Path, compressed: Path, ids: Any) -> float | None:
    """||Y' - Y|| / ||Y|| of what the block adds to its inputs; None if the inputs differ."""
    import torch

    import compress

    inputs, added = [], []
    for folder in (model, compressed):
        (loaded, _), seen = compress.load(str(folder), dtype="float32"), []
        block = loaded.model.layers[0]
        block.register_forward_hook(
            lambda module, given, output, seen=seen: seen.append(
                (given[0], (output[0] if isinstance(output, tuple) else output) - given[0])
            ),
        )
        with torch.inference_mode():
            for sequence in ids:
                loaded(sequence[None].long())
        inputs.append(torch.cat([x for x, _ in seen]))
        added.append(torch.cat([y for _, y in seen]))
        del loaded, block
    if inputs[0].shape != inputs[1].shape or not torch.allclose(*inputs, rtol=0.01, atol=0.01 * float(inputs[0].std())):
        return None
    return float((added[1] - added[0]).norm() / added[0].norm())


if __name__ == "__main__":
    main()
