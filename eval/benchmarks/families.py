"""Try every pass on a tiny model of every family, and write docs/families.md.

    python eval/benchmarks/families.py [--write] [--only FAMILY...] [--passes PASS...]

Prints a line per cell: the family, the pass, the code of the outcome, seconds, and the message of a refusal. A cell that
crashes or has a wrong result is printed as such, and nothing is written. The whole matrix takes about half an hour.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
import transformers
from family_matrix import CHAINS, Family, document, read_document
from model_families import STRUCTURES

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/families.md; other cells stay as they are")
    parser.add_argument("--only", nargs="*", default=list(STRUCTURES), help="families")
    parser.add_argument("--passes", nargs="*", default=list(CHAINS), help="passes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    gc.collect()
    gc.freeze()  # every run collects garbage twice; what was imported stays
    cells, wrong = read_document(DOCUMENT.read_text(encoding="utf-8")) if DOCUMENT.exists() else {}, 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.only:
            family = Family(name, Path(scratch) / name)
            for key in arguments.passes:
                code, message = tried(family, key)
                wrong += code == "WRONG"
                cells.setdefault(name, {})[key] = code
                print(name, key, code, message, flush=True)
            shutil.rmtree(Path(scratch) / name)
    if wrong:
        sys.exit(f"{wrong} cells are wrong")
    if arguments.write:
        DOCUMENT.write_text(document(cells), encoding="utf-8")


def tried(family: Family, key: str) -> tuple[str, str]:
    """The code of a cell, and its seconds and message."""
    begin = time.perf_counter()
    try:
        outcome = family.cell(key)
        code, message = outcome.code, outcome.refused
    except Exception as error:  # a defect: the other cells are of use
        code, message = "WRONG", f"{type(error).__name__}: {error}"
    return code, f"[{time.perf_counter() - begin:.1f} s] {message}".strip()


if __name__ == "__main__":
    main()
