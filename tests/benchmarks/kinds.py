"""Quality, bytes and seconds of recipes on a model without a language-model head, such as a sentence encoder.

    python tests/benchmarks/kinds.py MODEL [--text FILE] [--only NAME...] [--out FOLDER]

MODEL is compressed by every recipe of `ROWS`, calibrated on 64 windows of 128 tokens of the text, in format native with
float32 for what is not compressed. The reloaded checkpoint is compared with MODEL on 64 other windows of 128 tokens.
One row of a Markdown table per recipe: the measures of agreement with their standard errors, megabytes of the
checkpoint, bits per weight of the compressed layers, and seconds of all passes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import compress
from compress.evaluate.agreement import WORDS, Measure
from compress.recipe.schema import read_passes

INT8, INT4 = {"weights": "int8", "group_size": 64}, {"weights": "int4", "group_size": 64}
DISTILL = {"train": ["weights", "biases", "norms"], "steps": 300, "learning_rate": 0.0003, "batch": 8}
ROWS = {
    "int8, rtn": [{"rtn": INT8}],
    "int8, gptq": [{"gptq": INT8}],
    "int8, awq and rtn": [{"awq": INT8}, {"rtn": INT8}],
    "int4, rtn": [{"rtn": INT4}],
    "int4, gptq": [{"gptq": INT4}],
    "int4, awq and rtn": [{"awq": INT4}, {"rtn": INT4}],
    "int4, gptq; int8 embeddings": [
        {"gptq": INT4}, {"rtn": {"weights": "int8", "group_size": "channel", "targets": ["embed_tokens"]}}
    ],
    "50%, sparsegpt": [{"sparsegpt": {"sparsity": 0.5}}],
    "2:4, sparsegpt": [{"sparsegpt": {"pattern": "2:4"}}],
    "drop_blocks": [{"drop_blocks": {"count": 1}}],
    "drop_blocks, distill": [{"drop_blocks": {"count": 1}}, {"distill": DISTILL}],
}  # fmt: skip
"""The passes of each row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="hub id or local folder")
    parser.add_argument("--text", default="embedded", help="text of the calibration and of the comparison")
    parser.add_argument("--only", nargs="*", default=list(ROWS), help="names of rows")
    parser.add_argument("--out", help="keep the checkpoints in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for i, name in enumerate(arguments.only):
            folder = Path(arguments.out or scratch) / f"{i:02} {name}"
            measured(arguments.model, arguments.text, name, folder, head=i == 0)


def measured(model: str, text: str, name: str, folder: Path, head: bool) -> None:
    """Run a row and print it. head: print the head of the table first."""
    recipe = compress.Recipe(
        model=model,
        calibration=compress.Calibration(source=text, sequences=64, length=128, batch=16),
        passes=read_passes(ROWS[name]),
        save=compress.Save(format="native"),
        eval=compress.Evaluate(agreement=(text,), windows=64, length=128),
    )
    report = compress.run(recipe, folder, overwrite=True, progress=False).report
    measures = report["agreement"][0]["measures"]
    if head:
        names = [WORDS[key].name for key in measures]
        print(row(["recipe", *names, "MB", "bits per weight", "seconds"]))
        print(row(["---"] * (4 + len(names))), flush=True)
    seconds = sum(cost["seconds"] for phase, cost in report["costs"].items() if phase.startswith("passes"))
    shown = [WORDS[key].shown(Measure(**values)) for key, values in measures.items()]
    size = report["size"]
    figures = [f"{size['checkpoint_bytes'] / 1e6:.1f}", f"{size['bits_per_weight']:.2f}", f"{seconds:.0f}"]
    print(row([name, *shown, *figures]), flush=True)


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
