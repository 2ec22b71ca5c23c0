"""Perplexity through llama.cpp: its own quantizer against the presets of the same types, with the same bytes.

    python tests/benchmarks/versus_llamacpp.py MODEL CALIBRATION.npy EVALUATION.npy [--types Q4_0 Q4_K_M ...]
        [--llama-python PATH] [--work FOLDER] [--overwrite]

MODEL is a folder or a .gguf file; the two .npy files hold token ids [sequences, length] of its tokenizer. llama.cpp
gets the model in float32, and an importance matrix from the calibration ids (the mean squares of the inputs of every
matrix); each type is also quantized without one. --llama-python: a Python with llama-cpp-python, if it is not this one. Started again, it goes on with the files in --work;
--overwrite computes those of compress again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import torch

import compress
from compress import Recipe
from compress.model.open.opening import open_model
from compress.recipe.starts import quantize_data

PEER = Path(__file__).parent / "peer_llamacpp.py"
TYPES = ("Q4_0", "Q4_K_M", "Q3_K_M", "Q2_K")


def peer(python: str, *arguments: str) -> str:
    """Run llama.cpp's side and return the last line that it prints."""
    done = subprocess.run([python, str(PEER), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def importance(model: torch.nn.Module, ids: np.ndarray, path: Path) -> None:
    """Write the mean squared inputs of every linear by its name in the file."""
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == "llama"), model.config.num_hidden_layers
    )
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str):
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).double()
            sums[name] = sums.get(name, 0) + x.square().sum(0)
            counts[name] = counts.get(name, 0) + len(x)

        return hook

    for full, module in model.named_modules():
        found = names.get_name(f"{full}.weight", (".weight",)) if isinstance(module, torch.nn.Linear) else None
        if found is not None:
            module.register_forward_pre_hook(watch(found))
    with torch.no_grad():
        for row in ids:
            model(input_ids=torch.from_numpy(row.astype(np.int64))[None])
    np.savez(path, **{name: (total / counts[name]).float().numpy() for name, total in sums.items()})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("evaluation")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--work", type=Path, default=Path("out/versus_llamacpp"))
    parser.add_argument("--importance-only", action="store_true", help="leave out llama.cpp without a matrix")
    parser.add_argument("--overwrite", action="store_true", help="compute the files of compress again")
    given = parser.parse_args()
    work = given.work
    work.mkdir(parents=True, exist_ok=True)
    dense = work / "dense" / "model.gguf"
    if not dense.exists():
        opened = open_model(given.model)
        with opened.streaming() as model:
            for block in opened.blocks:
                opened.weights.bring(block)
            compress.save(model, dense.parent, "gguf", opened.tokenizer, "float32", embedding="dense", head="dense")
            importance(model, np.load(given.calibration), work / "importance.npz")
        print(
            "float32",
            dense.stat().st_size,
            peer(given.llama_python, "perplexity", str(dense), given.evaluation),
            flush=True,
        )
    rows = []
    for kind in given.types:
        files = {}
        own = [("llama.cpp", ()), ("llama.cpp, imatrix", (str(work / "importance.npz"),))]
        for label, extra in own[given.importance_only :]:
            files[label] = work / f"{kind}{'-imatrix' if extra else ''}.gguf"
            if not files[label].exists():
                peer(given.llama_python, "quantize", str(dense), str(files[label]), kind, *extra)
        data = quantize_data(given.model, kind)
        data |= {"calibration": {"source": given.calibration, "sequences": None, "length": None}, "eval": None}
        data["save"]["verify"] = "own"
        recipe = Recipe.from_data(data)
        folder = work / kind
        compress.run(recipe, folder, overwrite=given.overwrite, progress=False)
        files["compress"] = folder / "model.gguf"
        for label, file in files.items():
            found = float(peer(given.llama_python, "perplexity", str(file), given.evaluation))
            rows.append((kind, label, file.stat().st_size / 1e6, found))
            print(f"{kind:7} {label:19} {rows[-1][2]:8.2f} MB {found:9.4f}", flush=True)


if __name__ == "__main__":
    main()
