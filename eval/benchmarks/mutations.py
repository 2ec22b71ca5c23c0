"""Whether the tests see a line that is broken: each of these mutations must make the tests named with it fail.

    python eval/benchmarks/mutations.py [WORD...] [--check]

WORD: only mutations whose file or note holds it. Each is made in a temporary copy of the repository, never in the
working tree. Prints killed or survived for each; the exit code is the number of those that survived.
--check only sees that each mutation can be made: its line stands once in the file, and its tests are there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("compress", "tests", "recipes", "calibration", "eval", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in `file`, becomes `new`; `tests` must see it: paths under tests/, also with ::NAME.

    note: the mistake.
    """

    file: str
    old: str
    new: str
    tests: str
    note: str


MUTATIONS = (
    Mutation(
        "compress/numerics/column_sweep.py",
        "work[stop:].addmm_(ratios[:, stop - start :].T, errors, alpha=-1)",
        "work[stop:].addmm_(ratios[:, stop - start :].T, errors, alpha=1)",
        "numerics/test_column_sweep.py",
        "later columns take the error on with the wrong sign",
    ),
    Mutation(
        "compress/numerics/column_sweep.py",
        "row * ((new_values - values[row_index, chosen]) / pivot)[:, None]",
        "row * ((new_values - values[row_index, chosen]) * pivot)[:, None]",
        "numerics/test_column_sweep.py passes/test_obq.py",
        "OBQ multiplies the error by the pivot",
    ),
    Mutation(
        "compress/numerics/linalg.py",
        "(upper_left[strip, start:] @ upper_right[start:]).neg_()",
        "(upper_left[strip, start:] @ upper_right[start:])",
        "numerics/test_linalg.py",
        "the corner of a triangular inverse loses its sign",
    ),
    Mutation(
        "compress/numerics/quant/rounding.py",
        "values = values * self.keep[column]",
        "values = values * self.keep[column - 1]",
        "passes/test_gptq.py",
        "the mask of the column before",
    ),
    Mutation(
        "compress/numerics/quant/grids.py",
        "codes = codes.add_(zero)",
        "codes = codes.sub_(zero)",
        "passes/test_rtn.py",
        "the zero point has the wrong sign",
    ),
    Mutation(
        "compress/numerics/quant/grids.py",
        "return codes.round_().clamp_(self.lowest, self.highest)",
        "return codes.round_().clamp_(-self.highest, self.highest)",
        "passes/test_rtn.py",
        "the lowest code is never used",
    ),
    Mutation(
        "compress/numerics/sparse/masks.py",
        "is_equal &= rank <= room",
        "is_equal &= rank < room",
        "numerics/sparse/test_masks.py",
        "one weight of those that tie is lost",
    ),
    Mutation(
        "compress/numerics/quant/bits.py",
        "stream[byte + 1] |= code >> (8 - offset)",
        "stream[byte + 1] |= code >> (7 - offset)",
        "numerics/quant/test_bits.py",
        "codes that cross a byte are shifted by one bit too few",
    ),
    Mutation(
        "compress/checkpoint/formats/layouts/pack_quantized.py",
        "pack(unsigned.T, part.grid.bits).T",
        "pack(unsigned, part.grid.bits)",
        "checkpoint/formats/test_pack_quantized.py",
        "zero points are packed along the wrong axis",
    ),
    Mutation(
        "compress/checkpoint/formats/layouts/pack_quantized.py",
        "zero = None if part.zero is None else part.zero[:, group]",
        "zero = part.zero",
        "checkpoint/formats/test_pack_quantized.py",
        "zero points are not regrouped with their scales",
    ),
    Mutation(
        "compress/passes/contract/observers.py",
        "near.triu() + near.triu(1).T",
        "near.triu() + near.triu().T",
        "passes/contract/test_observers.py",
        "the Hessian counts its diagonal twice",
    ),
    Mutation(
        "compress/blockwise/context.py",
        "hidden[i] = self.checked(forward())",
        "self.checked(forward())",
        "blockwise/test_sweep.py",
        "the next block is calibrated on this block's inputs",
    ),
    Mutation(
        "compress/pipeline/checkpoint.py",
        "if manifest is not None and manifest.fingerprint == fingerprint:",
        "if manifest is not None:",
        "pipeline/test_checkpoint.py",
        "another run is taken up",
    ),
    Mutation(
        "compress/data/tokenization.py",
        "sum(len(piece.text) for piece in [*short, *start]) > together",
        "sum(len(piece.text) for piece in [*short, *start]) > 10**12",
        "data/test_pieces.py",
        "the short documents of a text are tokenized at once",
    ),
    Mutation(
        "compress/data/sources.py",
        "while chunk := file.read(CHUNK):",
        "while chunk := file.read():",
        "data/test_pieces.py",
        "a text is read whole",
    ),
    Mutation(
        "compress/checkpoint/containers/gguf_header.py",
        "if count * least > self._size - self._file.tell():",
        "if False:",
        "checkpoint/formats/containers/test_gguf_header.py",
        "the count of an array of a GGUF file is not compared with its size",
    ),
    Mutation(
        "compress/checkpoint/sources/gguf.py",
        "limited_modules(path, sum(part.stat().st_size for part in parts))",
        "limited_modules(path, sum(part.stat().st_size for part in path.parent.iterdir()))",
        "checkpoint/sources/test_gguf_contents.py",
        "files beside a GGUF file allow it more modules",
    ),
    Mutation(
        "compress/numerics/hadamard.py",
        "return width % order == 0 and (parts := factors(order)) is not None",
        "return (parts := factors(order)) is not None and width % order == 0",
        "numerics/test_hadamard.py",
        "the order of a file is factored although it does not divide the width",
    ),
    Mutation(
        "compress/checkpoint/sources/gguf.py",
        'with FileLock(folder.with_suffix(".lock")):',
        "if True:",
        "checkpoint/sources/test_gguf.py",
        "commands at the same time convert a file each",
    ),
    Mutation(
        "compress/checkpoint/sources/gguf.py",
        'check_none_missing(header, info["missing_keys"])',
        "pass",
        "checkpoint/sources/test_gguf_contents.py",
        "a missing tensor of a GGUF file is random",
    ),
    Mutation(
        "compress/models/child_process.py",
        "capture_output=True, text=True, check=False, cwd=folder, env",
        "capture_output=True, text=True, check=False, env",
        "models/test_child_process.py",
        "a child process works in the folder of the files that it reads",
    ),
    Mutation(
        "compress/recipe/starts.py",
        'if method in PASSES and PASSES.kind(method) != "prune":',
        "if False:",
        "test_cli.py::test_prune_accepts_only_passes_that_prune",
        "prune accepts passes that remove no weights",
    ),
    Mutation(
        "compress/pipeline/finish.py",
        "base = digest_of(job.opened.answers_digest, dtype,",
        "base = digest_of(job.opened.fingerprint, dtype,",
        "evaluation/test_kept_results.py",
        "answers of a base model are used after its chat template has changed",
    ),
    Mutation(
        "compress/evaluation/store.py",
        "folder=self.shared or self.folder, model=self.base",
        "folder=self.folder, model=self.base",
        "evaluation/test_kept_results.py",
        "every run measures its base model again",
    ),
    Mutation(
        "compress/checkpoint/opening.py",
        "    if folder is None or _has_weights(folder):",
        "    if True:",
        "pipeline/test_plan_without_weights.py",
        "a plan needs the weights",
    ),
    Mutation(
        "compress/checkpoint/opening.py",
        "all(path.exists() for path in weight_files(folder))",
        "True",
        "checkpoint/sources/test_hub.py::test_a_partly_fetched_model_is_planned_and_its_missing_files_are_named",
        "a plan needs all files of a model that was fetched in part",
    ),
    Mutation(
        "compress/checkpoint/sources/gguf_contents.py",
        "[stated] if isinstance(stated, int) else []",
        "",
        "checkpoint/sources/test_gguf_contents.py::test_positions_of_divisors_are_those_that_the_file_states",
        "the stated positions of rotary divisors are not tried",
    ),
    Mutation(
        "compress/checkpoint/formats/modelopt.py",
        "if name in schemes and algorithm is not None:",
        "if False:",
        "checkpoint/formats/test_closed_lists.py checkpoint/formats/test_read_only.py",
        "a stated algorithm of Model Optimizer is not compared with the tensors",
    ),
    Mutation(
        "compress/pipeline/generate.py",
        '"top_k": self.top_k}',
        '"top_k": None}',
        "cli/test_short_things.py",
        "--top-k has no effect",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--check", action="store_true", help="only see that each can be made")
    arguments = parser.parse_args()
    words = arguments.words
    chosen = [m for m in MUTATIONS if not words or any(word in m.file + " " + m.note for word in words)]
    if arguments.check:
        wrong = [problem for mutation in chosen for problem in problems(mutation)]
        print("\n".join(wrong or [f"{len(chosen)} mutations can be made"]))
        return len(wrong)
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for mutation in chosen:
            killed = tried(mutation, copy)
            survived += not killed
            print(
                f"{'killed  ' if killed else 'SURVIVED'}  {mutation.file}: {mutation.note} ({mutation.tests})",
                flush=True,
            )
    return survived


def problems(mutation: Mutation) -> list[str]:
    """Why a mutation cannot be made in the working tree."""
    path = ROOT / mutation.file
    count = path.read_text(encoding="utf-8").count(mutation.old) if path.exists() else 0
    found = [] if count == 1 else [f"{mutation.file}: {mutation.old!r} stands there {count} times, not once"]
    missing = [test for test in mutation.tests.split() if not (ROOT / "tests" / test.partition("::")[0]).exists()]
    return found + [f"{mutation.file}: tests/{test} is not there" for test in missing]


def tried(mutation: Mutation, copy: Path) -> bool:
    """Whether the tests fail with the mutation; the copy is as before afterwards."""
    path = copy / mutation.file
    whole = path.read_text(encoding="utf-8")
    assert whole.count(mutation.old) == 1, f"{mutation.file}: {mutation.old!r} does not stand there once"
    path.write_text(whole.replace(mutation.old, mutation.new), encoding="utf-8")
    paths = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", *(f"tests/{test}" for test in mutation.tests.split())]
    try:
        done = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
    finally:
        path.write_text(whole, encoding="utf-8")
    assert done.returncode in (0, 1), (
        f"{mutation.file}: the tests did not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
