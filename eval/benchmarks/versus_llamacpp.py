"""Loss and KL divergence through llama.cpp: its own quantizer against the presets of the same types.

    python eval/benchmarks/versus_llamacpp.py MODEL CALIBRATION EVALUATION [--types Q4_0 Q4_K_M ...]
        [--recipe recipes/best-gguf.yaml ...] [--sequences 32 --windows 32 --length 256] [--llama-python PATH]
        [--work FOLDER] [--overwrite]

MODEL is a folder or a .gguf file; CALIBRATION and EVALUATION are .npy files of token ids [sequences, length] of its
tokenizer, or texts, cut into --sequences and --windows of --length tokens; of the same text, the evaluation reads the
first quarter and the calibration the rest. llama.cpp gets the model in float32, and an importance matrix from the
calibration (the mean squares of the inputs of every matrix); each type is also quantized without one, if llama.cpp does
that. KL: of the next-token distribution of the float32 file to that of a file, nats per token; the logits of both are
llama.cpp's. Differences have the standard error over the windows. --types: all presets of GGUF types if not given.
--llama-python: a Python with llama-cpp-python, if it is not this one. Started again, it goes on with the files in --work;
--overwrite computes those of compress again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from gguf import GGUFReader

import compress
from compress import Recipe
from compress.checkpoint.containers.gguf import INDEX
from compress.checkpoint.containers.imatrix import read_imatrix
from compress.checkpoint.opening import open_model
from compress.data.ids import sample
from compress.data.opening import special_tokens_around
from compress.data.text_source import Part, TextSource
from compress.recipe.presets import presets
from compress.recipe.starts import quantize_data

PEER = Path(__file__).parent / "peer_llamacpp.py"
TYPES = tuple(name for name, preset in presets().items() if preset.save.get("format") == "gguf")
NEED_MATRIX = ("IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS")
"""Types that llama.cpp does not write without an importance matrix (llama.cpp, tensor_requires_imatrix)."""


@dataclass(frozen=True)
class Measured:
    """A file, measured by llama.cpp. losses, divergences: of each window."""

    file: Path
    losses: np.ndarray
    divergences: np.ndarray

    @property
    def types(self) -> str:
        """How many matrices have which type."""
        kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(self.file).tensors if len(tensor.shape) > 1)
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))

    @property
    def row(self) -> str:
        """Bytes, perplexity, KL divergence, and types."""
        perplexity, divergence = np.exp(self.losses.mean()), estimate(self.divergences, "")
        return f"{self.file.stat().st_size:11,} bytes {perplexity:9.4f} KL {divergence}  {self.types}"


def peer(python: str, *arguments: str) -> None:
    """Run llama.cpp's side."""
    done = subprocess.run([python, str(PEER), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])


def token_files(given: argparse.Namespace) -> dict[str, Path]:
    """The token ids of both parts as .npy files, those of texts in the folder of the work."""
    found: dict[str, Path] = {}
    parts: tuple[tuple[Part, str, int], ...] = (
        ("calibration", given.calibration, given.sequences),
        ("test", given.evaluation, given.windows),
    )
    for part, source, count in parts:
        if source.endswith(".npy"):
            found[part] = Path(source).absolute()
            continue
        found[part] = given.work.absolute() / f"{part}-{count}x{given.length}.npy"
        if not found[part].exists():
            tokenizer = open_model(given.model).tokenizer
            if tokenizer is None:
                sys.exit(f"{given.model} has no tokenizer; write token ids as .npy files")
            text = TextSource(source=source, divided=given.calibration == given.evaluation)
            prefix = special_tokens_around(tokenizer)[0]
            np.save(found[part], sample(text, part, tokenizer, count, given.length, 0, prefix)[0].numpy())
    return found


def dense_file(given: argparse.Namespace, calibration: Path) -> Path:
    """The model in float32 as one file, without the names that only compress reads, and the importance matrix."""
    dense, plain = given.work / "dense" / "model.gguf", given.work / "float32.gguf"
    if not plain.exists():
        opened = open_model(given.model)
        with opened.streaming() as model:
            for block in opened.blocks:
                opened.weights.bring(block)
            compress.save(model, dense.parent, "gguf", opened.tokenizer, "float32", embedding="dense", head="dense")
        without = ["--remove-metadata", INDEX, "--force", str(dense), str(plain)]
        subprocess.run(
            [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", *without], check=True, capture_output=True
        )
    matrix = given.work / "importance.npz"
    if not matrix.exists():
        sequences, length = np.load(calibration).shape
        written = given.work / "imatrix.gguf"
        compress.imatrix(
            given.model, written, text=str(calibration), sequences=sequences, length=length, dtype="float32"
        )
        entries: dict[str, Any] = {name: read().numpy() for name, read in read_imatrix(written).items()}
        np.savez(matrix, **entries)
    return plain


def theirs(given: argparse.Namespace, kind: str, dense: Path) -> dict[str, Path]:
    """The files of one type that llama.cpp writes: without and with the matrix."""
    found = {}
    matrix = str(given.work / "importance.npz")
    for label, extra in {"llama.cpp": (), "llama.cpp, imatrix": (matrix,)}.items():
        if not extra and kind in NEED_MATRIX:
            continue
        found[label] = given.work / f"{kind}{'-imatrix' if extra else ''}.gguf"
        if not found[label].exists():
            peer(given.llama_python, "quantize", str(dense), str(found[label]), kind, *extra)
    return found


def ours(given: argparse.Namespace, name: str, data: dict[str, Any], calibration: Path) -> Path:
    """The file of a recipe, with the model and the calibration of this comparison."""
    data |= {"model": given.model, "eval": None}
    data["calibration"] = {"source": str(calibration), "sequences": None, "length": None}
    data["save"]["verify"] = "own"
    compress.run(Recipe.from_data(data), given.work / name, overwrite=given.overwrite, progress=False)
    return given.work / name / "model.gguf"


def measured(python: str, dense: Path, files: Sequence[Path], evaluation: Path) -> list[Measured]:
    """The loss and KL divergence of each window; kept next to the files, until they or the ids change."""
    kept = {file: file.with_suffix(".measured.npy") for file in files}
    stale = [
        str(file)
        for file, values in kept.items()
        if not values.exists()
        or values.stat().st_mtime < max(path.stat().st_mtime for path in (file, dense, evaluation))
    ]
    if stale:
        peer(python, "measure", str(dense), str(evaluation), *stale)
    return [Measured(file, *np.load(values)) for file, values in kept.items()]


def estimate(values: np.ndarray, sign: str = "+") -> str:
    """The mean over the windows, with its standard error."""
    return f"{values.mean():{sign}.5f} ± {values.std(ddof=1) / len(values) ** 0.5:.5f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("evaluation")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--sequences", type=int, default=32, help="of a text for calibration")
    parser.add_argument("--windows", type=int, default=32, help="of a text for evaluation")
    parser.add_argument("--length", type=int, default=256, help="tokens of both")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--work", type=Path, default=Path("out/versus_llamacpp"))
    parser.add_argument("--recipe", type=Path, nargs="+", default=(), help="recipes whose first pass is a scheme")
    parser.add_argument("--peer-only", action="store_true", help="only the files of llama.cpp")
    parser.add_argument("--overwrite", action="store_true", help="compute the files of compress again")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    ids = token_files(given)
    dense = dense_file(given, ids["calibration"])

    found: dict[tuple[str, str], Measured] = {}

    def rows(kind: str, files: Mapping[str, Path]) -> None:
        values = measured(given.llama_python, dense, list(files.values()), ids["test"])
        for label, each in zip(files, values, strict=True):
            found[kind, label] = each
            print(f"{kind:7} {label:18} {each.row}", flush=True)

    rows("float32", {"llama.cpp": dense})
    for kind in given.types:
        files = theirs(given, kind, dense)
        if not given.peer_only:
            files["compress"] = ours(given, kind, quantize_data(given.model, kind), ids["calibration"])
        rows(kind, files)
    for path in given.recipe:
        data = yaml.safe_load(path.read_text())
        rows(data["passes"][0]["scheme"], {path.stem: ours(given, path.stem, data, ids["calibration"])})
    for (kind, label), compared in found.items():
        for (other, peer_label), peers in found.items() if not label.startswith("llama.cpp") else ():
            if peer_label.startswith("llama.cpp") and (other == kind or (kind, other) == ("Q4_0", "Q4_K_M")):
                size = compared.file.stat().st_size / peers.file.stat().st_size - 1
                divergence = estimate(compared.divergences - peers.divergences)
                loss = estimate(compared.losses - peers.losses)
                print(
                    f"{kind} of {label} minus {other} of {peer_label}: KL {divergence}, loss {loss}, bytes {size:+.2%}"
                )


if __name__ == "__main__":
    main()
