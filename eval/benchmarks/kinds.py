"""Quality, bytes and seconds of recipes on a real model of any kind, such as a decoder or a sentence encoder.

    python eval/benchmarks/kinds.py MODEL [--text FILE] [--only NAME...] [--windows 64] [--length 128] [--steps 300]
        [--train weights norms] [--out FOLDER]

MODEL is compressed by every recipe of `ROWS`, calibrated on windows of the text, in format native. The reloaded
checkpoint is compared with MODEL on as many other windows. One row of a Markdown table per recipe: the measures of
agreement, or for a language model its perplexity, the difference of the losses and the KL divergence in nats per token,
with their standard errors; megabytes of the checkpoint, bits per weight of the compressed layers, and seconds of all
passes. Rows that the model cannot have stand last, with the reason, such as an embedding that is tied to the output head.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import compress
from compress.recipe.schema import read_passes
from compress.results.measurements.agreement import MEASURE_WORDS, Measure

INT8, INT4 = {"weights": "int8", "group_size": 64}, {"weights": "int4", "group_size": 64}
LEARNED = {"steps": 300, "learning_rate": 0.0003, "batch": 8}
DISTILL = {"train": ["weights", "biases", "norms"], **LEARNED}
INPUTS = {"activations": "int8"}
EMBEDDINGS = {"rtn": {"weights": "int8", "group_size": "channel", "targets": ["embed_tokens"]}}
ROWS = {
    "int8, rtn": [{"rtn": INT8}],
    "int8, gptq": [{"gptq": INT8}],
    "int8, awq and rtn": [{"awq": INT8}, {"rtn": INT8}],
    "int4, rtn": [{"rtn": INT4}],
    "int4, gptq": [{"gptq": INT4}],
    "int4, awq and rtn": [{"awq": INT4}, {"rtn": INT4}],
    "int4, gptq; int8 embeddings": [{"gptq": INT4}, EMBEDDINGS],
    "50%, sparsegpt": [{"sparsegpt": {"sparsity": 0.5}}],
    "2:4, sparsegpt": [{"sparsegpt": {"pattern": "2:4"}}],
    "drop_blocks": [{"drop_blocks": {"count": 1}}],
    "drop_blocks, distill": [{"drop_blocks": {"count": 1}}, {"distill": DISTILL}],
    "W8A8, rtn": [{"rtn": {"weights": "int8", "group_size": "channel", **INPUTS}}],
    "W8A8, rtn; a fifth of the inputs in 16 bits (Bondarenko 2021)": [
        {"rtn": {"weights": "int8", "group_size": "channel", **INPUTS}},
        {"mixed_precision": {"fraction": 0.2}},
    ],
    "W8A8, static scales": [
        {"rtn": {"weights": "int8", "group_size": "channel", **INPUTS, "activation_scale": "static"}}
    ],
    "W8A8, static scales of 6 groups of channels (PEG, Bondarenko 2021)": [
        {"rptq": {"grouping": "equal", "clusters": 6}},
        {"rtn": {"weights": "int8", "group_size": "channel"}},
    ],
    "W8A8, scales of 6 groups of channels per token (PEG)": [
        {"rptq": {"grouping": "equal", "clusters": 6, "activation_scale": "token"}},
        {"rtn": {"weights": "int8", "group_size": "channel"}},
    ],
    "W8A8, static scales of 32 clusters of channels (RPTQ)": [
        {"rptq": {}},
        {"rtn": {"weights": "int8", "group_size": "channel"}},
    ],
    "W4A8, a range per matrix; int8 embeddings": [
        {"rtn": {"weights": "int4", "group_size": "tensor", "symmetric": False, "scale": "mse", **INPUTS}},
        EMBEDDINGS,
    ],
    "W4A8, a range per head of 32 rows; int8 embeddings (Q-BERT)": [
        {
            "rtn": {
                "weights": "int4",
                "group_size": "channel",
                "block_rows": 32,
                "symmetric": False,
                "scale": "mse",
                **INPUTS,
            }
        },
        EMBEDDINGS,
    ],
    "W4A8, a range per 3 rows, 128 in a matrix; int8 embeddings (Q-BERT)": [
        {
            "rtn": {
                "weights": "int4",
                "group_size": "channel",
                "block_rows": 3,
                "symmetric": False,
                "scale": "mse",
                **INPUTS,
            }
        },
        EMBEDDINGS,
    ],
    "W4A8, a range per row; int8 embeddings": [
        {"rtn": {"weights": "int4", "group_size": "channel", "symmetric": False, "scale": "mse", **INPUTS}},
        EMBEDDINGS,
    ],
    "W4A8, rtn in groups of 32; int8 embeddings (Q-BERT)": [
        {"rtn": {"weights": "int4", "group_size": 32, "symmetric": False, **INPUTS}},
        EMBEDDINGS,
    ],
    "every second block, distill (DistilBERT)": [
        {"drop_blocks": {"sparsity": 0.5, "by": "spacing"}},
        {"distill": {**DISTILL, "cosine": 1.0, "top_k": None}},
    ],
    "50% in blocks of 4 x 4, gmp with distillation (Lagunas 2021)": [
        {
            "gmp": {
                "pattern": "4x4",
                "sparsity": 0.5,
                "ce_weight": 0,
                **LEARNED,
                "train": ["weights", "biases", "norms"],
                "weight_rate": 1.0,
            }
        }
    ],
}
"""The passes of each row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="hub id or local folder")
    parser.add_argument("--text", default="embedded", help="text of the calibration and of the comparison")
    parser.add_argument("--only", nargs="*", default=list(ROWS), help="names of rows")
    parser.add_argument("--windows", type=int, default=64, help="calibration sequences, and windows of the comparison")
    parser.add_argument("--length", type=int, default=128, help="tokens of each")
    parser.add_argument("--steps", type=int, default=DISTILL["steps"], help="training steps of distill and gmp")
    parser.add_argument(
        "--train", nargs="+", default=DISTILL["train"], help="what they train; without biases if a model has none"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", help="keep the checkpoints in this folder")
    arguments = parser.parse_args()
    head, refused = True, []
    with tempfile.TemporaryDirectory() as scratch:
        for i, name in enumerate(arguments.only):
            folder = Path(arguments.out or scratch) / f"{i:02} {name}"
            try:
                measured(recipe_of(arguments, name), name, folder, head)
                head = False
            except compress.CompressError as error:
                if error.exit_code != 2:  # not a matter of the model
                    raise
                refused.append(row([name, str(error)]))
    for line in refused:
        print(line)


def recipe_of(arguments: argparse.Namespace, name: str) -> compress.Recipe:
    """The recipe of a row."""
    texts = {"windows": arguments.windows, "length": arguments.length}
    given = {"steps": arguments.steps, "train": arguments.train}
    steps = [
        {key: options | (given if "steps" in options else {})}
        for ((key, options),) in (step.items() for step in ROWS[name])
    ]
    return compress.Recipe(
        model=arguments.model,
        dtype=arguments.dtype,
        calibration=compress.Calibration(
            source=arguments.text, sequences=arguments.windows, length=arguments.length, batch=2048 // arguments.length
        ),
        passes=read_passes(steps),
        save=compress.Save(format="native"),
        eval=compress.Evaluate(agreement=(arguments.text,), perplexity=(arguments.text,), **texts),
    )


def measured(recipe: compress.Recipe, name: str, folder: Path, head: bool) -> None:
    """Run a row and print it. head: print the head of the table first."""
    report = compress.run(recipe, folder, overwrite=True, progress=False).report
    shown = quality(report)
    if head:
        print(row(["recipe", *shown, "MB", "bits per weight", "seconds"]))
        print(row(["---"] * (4 + len(shown))), flush=True)
    seconds = sum(cost["seconds"] for phase, cost in report["costs"].items() if phase.startswith("passes"))
    size = report["size"]
    figures = [f"{size['checkpoint_bytes'] / 1e6:.1f}", f"{size['bits_per_weight']:.2f}", f"{seconds:.0f}"]
    print(row([name, *shown.values(), *figures]), flush=True)


def quality(report: dict[str, Any]) -> dict[str, str]:
    """The measures by name: of agreement, or of the loss of a language model."""
    if report["agreement"]:
        measures = report["agreement"][0]["measures"]
        words = {key: MEASURE_WORDS[key] for key in measures}
        return {words[key].name: words[key].value_text(Measure(**values)) for key, values in measures.items()}
    found = report["perplexity"][0]
    delta, kl = found["difference"], found["divergence"]
    return {
        f"perplexity ({found['base']['perplexity']:.2f} uncompressed)": f"{found['compressed']['perplexity']:.2f}",
        "loss minus the uncompressed model's": f"{delta['loss']:+.4f} ± {delta['stderr']:.4f}",
        "KL divergence": f"{kl['mean']:.4f} ± {kl['stderr']:.4f}",
    }


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
