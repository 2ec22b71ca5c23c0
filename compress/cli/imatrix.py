"""`compress imatrix`: the importance matrix of a model on a text, for the quantizer of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import click

from compress.cli.group import without_collection
from compress.cli.options import DEVICE, DTYPE
from compress.cli.paths import UserPath
from compress.cli.show import echo, print_json


@click.command()
@click.argument("model")
@click.option("-o", "--out", type=UserPath(), required=True, help="The file to write, which ends in .gguf.")
@click.option("--text", default="embedded", show_default=True, help="Text: embedded, wikitext, or a file.")
@click.option("--sequences", type=click.IntRange(min=1), default=32, show_default=True, help="Sequences of the text.")
@click.option("--length", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens per sequence.")
@DTYPE
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def imatrix(
    model: str, out: Path, text: str, sequences: int, length: int, dtype: str, device: str, as_json: bool
) -> None:
    """Write the importance matrix of MODEL: the mean squares of the inputs of its linears on a text.

    The quantizer of llama.cpp reads it (--imatrix), and the option imatrix of rtn.
    """
    with without_collection():
        from compress.pipeline.imatrix import imatrix as make
    made = make(model, out, text=text, sequences=sequences, length=length, dtype=dtype, device=device, progress=True)
    if as_json:
        counts = {"entries": made.entries, "layers": made.layers, "tokens": made.tokens}
        print_json({"path": str(made.path), **counts, "unreached": list(made.unreached)})
        return
    echo(f"{made.path}: {made.entries} matrices of {made.layers} linears, {made.tokens} tokens")
    if made.unreached:
        echo(f"note: no token reached {len(made.unreached)} linears of experts, such as {made.unreached[0]}")
