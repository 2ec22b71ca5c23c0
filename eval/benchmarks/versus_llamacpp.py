"""Perplexity through llama.cpp: its own quantizer against the presets of the same types, with the same bytes.

    python eval/benchmarks/versus_llamacpp.py MODEL CALIBRATION.npy EVALUATION.npy [--types Q4_0 Q4_K_M ...]
        [--recipe recipes/best-gguf.yaml ...] [--llama-python PATH] [--work FOLDER] [--overwrite]

MODEL is a folder or a .gguf file; the two .npy files hold token ids [sequences, length] of its tokenizer. llama.cpp
gets the model in float32, and an importance matrix from the calibration ids (the mean squares of the inputs of every
matrix); each type is also quantized without one. Differences of the loss have the standard error over the windows of
EVALUATION. --llama-python: a Python with llama-cpp-python, if it is not this one. Started again, it goes on with the
files in --work; --overwrite computes those of compress again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import yaml

import compress
from compress import Recipe
from compress.checkpoint.containers.gguf import INDEX
from compress.checkpoint.opening import open_model
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
            x = args[0].reshape(-1, args[0].shape[-1])
            sums[name] = sums.get(name, 0) + x.square().sum(0).double()
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


def losses(python: str, file: Path, evaluation: str) -> np.ndarray:
    """The loss of each window, computed by llama.cpp; kept next to the file, until the file or the ids change."""
    kept = file.with_suffix(".losses.npy")
    newest = max(file.stat().st_mtime, Path(evaluation).stat().st_mtime)
    if not kept.exists() or kept.stat().st_mtime < newest:
        peer(python, "losses", str(file), evaluation, str(kept))
    return np.load(kept)


def dense_file(given: argparse.Namespace) -> Path:
    """The model in float32 as one file, without the names that only compress reads, and the importance matrix."""
    dense, plain = given.work / "dense" / "model.gguf", given.work / "float32.gguf"
    if not (given.work / "importance.npz").exists():
        opened = open_model(given.model)
        with opened.streaming() as model:
            for block in opened.blocks:
                opened.weights.bring(block)
            compress.save(model, dense.parent, "gguf", opened.tokenizer, "float32", embedding="dense", head="dense")
            importance(model, np.load(given.calibration), given.work / "importance.npz")
    if not plain.exists():
        without = ["--remove-metadata", INDEX, "--force", str(dense), str(plain)]
        subprocess.run(
            [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", *without], check=True, capture_output=True
        )
    return plain


def theirs(given: argparse.Namespace, kind: str, dense: Path) -> dict[str, Path]:
    """The files of one type that llama.cpp writes: without and with the matrix."""
    found = {}
    matrix = str(given.work / "importance.npz")
    for label, extra in {"llama.cpp": (), "llama.cpp, imatrix": (matrix,)}.items():
        found[label] = given.work / f"{kind}{'-imatrix' if extra else ''}.gguf"
        if not found[label].exists():
            peer(given.llama_python, "quantize", str(dense), str(found[label]), kind, *extra)
    return found


def ours(given: argparse.Namespace, name: str, data: dict[str, Any]) -> Path:
    """The file of a recipe, with the model and the calibration of this comparison."""
    data |= {"model": given.model, "eval": None}
    data["calibration"] = {"source": given.calibration, "sequences": None, "length": None}
    data["save"]["verify"] = "own"
    compress.run(Recipe.from_data(data), given.work / name, overwrite=given.overwrite, progress=False)
    return given.work / name / "model.gguf"


def difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    """The mean difference of the windows' losses, with its standard error; negative: ours is lower."""
    gap = ours - theirs
    return f"{gap.mean():+.4f} ± {gap.std(ddof=1) / len(gap) ** 0.5:.4f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("evaluation")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--work", type=Path, default=Path("out/versus_llamacpp"))
    parser.add_argument("--recipe", type=Path, nargs="+", default=(), help="recipes whose first pass is a scheme")
    parser.add_argument("--peer-only", action="store_true", help="only the files of llama.cpp")
    parser.add_argument("--overwrite", action="store_true", help="compute the files of compress again")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    dense = dense_file(given)

    def row(kind: str, label: str, file: Path) -> np.ndarray:
        found = losses(given.llama_python, file, given.evaluation)
        print(f"{kind:7} {label:18} {file.stat().st_size:11,} bytes {np.exp(found.mean()):9.4f}", flush=True)
        return found

    row("float32", "", dense)
    found = {}
    for kind in given.types:
        for label, file in theirs(given, kind, dense).items():
            found[kind, label] = row(kind, label, file)
        if not given.peer_only:
            found[kind, "compress"] = row(kind, "compress", ours(given, kind, quantize_data(given.model, kind)))
    for path in given.recipe:
        data = yaml.safe_load(path.read_text())
        kind = data["passes"][0]["scheme"]
        found[kind, path.stem] = row(kind, path.stem, ours(given, path.stem, data))
    for (kind, label), own in found.items():
        for (other, peer_label), loss in found.items() if not label.startswith("llama.cpp") else ():
            if peer_label.startswith("llama.cpp") and (other == kind or (kind, other) == ("Q4_0", "Q4_K_M")):
                print(f"{kind} of {label}: loss minus that of {other} of {peer_label}: {difference(own, loss)}")


if __name__ == "__main__":
    main()
