"""Quality of recipes on an encoder-decoder model: a small T5 that is trained here on the text, or a model of one's own.

    python tests/benchmarks/pairs.py [--model MODEL] [--text FILE] [--steps N] [--only NAME...] [--out FOLDER]

Without --model, a T5 (gated, 2 + 2 blocks of width 128) with the tokenizer of the tests' small model learns to continue
the first half of a window with the second one. Every recipe of `ROWS` is calibrated on 64 windows of 128 tokens, in
format native, and measured on 64 others. One row of a Markdown table per recipe: the loss of the target tokens and its
difference from that of the base model, the divergence from the base model, each with its standard error, and bits per
weight of the compressed layers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import compress
from compress.data.ids import model_sample
from compress.models.kinds.inputs import source_and_target
from compress.recipe.schema import read_passes

TOKENIZER = Path(__file__).parents[1] / "pico" / "model"
WINDOWS, LENGTH, BATCH = 64, 128, 16
INT8, INT4, INT3 = ({"weights": grid, "group_size": 32} for grid in ("int8", "int4", "int3"))
ROWS = {
    "int8, rtn": [{"rtn": INT8}],
    "int4, rtn": [{"rtn": INT4}],
    "int4, awq and rtn": [{"awq": INT4}, {"rtn": INT4}],
    "int4, gptq": [{"gptq": INT4}],
    "int3, rtn": [{"rtn": INT3}],
    "int3, gptq": [{"gptq": INT3}],
    "int3, gptq, error asymmetric": [{"gptq": {**INT3, "error": "asymmetric"}}],
    "50%, magnitude": [{"magnitude": {"sparsity": 0.5}}],
    "50%, wanda": [{"wanda": {"sparsity": 0.5}}],
    "50%, sparsegpt": [{"sparsegpt": {"sparsity": 0.5}}],
}
"""The passes of each row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="hub id or local folder")
    parser.add_argument("--text", default="embedded", help="text of the training, the calibration and the evaluation")
    parser.add_argument("--steps", type=int, default=1500, help="steps of the training")
    parser.add_argument("--only", nargs="*", default=list(ROWS), help="names of rows")
    parser.add_argument("--out", help="keep the trained model and the checkpoints in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(arguments.out or scratch)
        model = arguments.model or trained(arguments.text, arguments.steps, out / "model")
        for i, name in enumerate(arguments.only):
            measured(model, arguments.text, name, out / f"{i:02} {name}", head=i == 0)


def trained(text: str, steps: int, folder: Path) -> str:
    """Train a model on the calibration part of a text, unless the folder has one; returns the folder."""
    if folder.exists():
        return str(folder)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    ids, _ = model_sample(model, tokenizer, text, "calibration", None, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        source, target = source_and_target(ids[torch.randint(len(ids), (BATCH,))])
        loss = model(input_ids=source, labels=target).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"<!-- step {step}: loss {float(loss):.3f} -->", flush=True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def measured(model: str, text: str, name: str, folder: Path, head: bool) -> None:
    """Run a row and print it. head: print the head of the table and the base model's row first."""
    recipe = compress.Recipe(
        model=model,
        calibration=compress.Calibration(source=text, sequences=WINDOWS, length=LENGTH, batch=BATCH),
        passes=read_passes(ROWS[name]),
        save=compress.Save(format="native"),
        eval=compress.Evaluate(perplexity=(text,), windows=WINDOWS, length=LENGTH),
    )
    report = compress.run(recipe, folder, overwrite=True, progress=False).report
    quality = report["perplexity"][0]
    if head:
        base = quality["base"]
        print(row(["recipe", "loss of target tokens", "difference", "KL divergence, nats", "bits per weight"]))
        print(row(["---"] * 5))
        print(row(["float32", f"{base['loss']:.4f} ± {base['stderr']:.4f}", "", "", "32"]), flush=True)
    own, gap, apart = quality["compressed"], quality["difference"], quality["divergence"]
    cells = [(own["loss"], own["stderr"]), (gap["loss"], gap["stderr"]), (apart["mean"], apart["stderr"])]
    shown = [f"{value:.4f} ± {error:.4f}" for value, error in cells]
    print(row([name, *shown, f"{report['size']['bits_per_weight']:.2f}"]), flush=True)


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
