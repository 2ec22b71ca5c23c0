"""`compress bench`: the speed of a checkpoint, alone or against another model in the same run."""

from __future__ import annotations

import click

from compress.cli.options import DTYPE
from compress.cli.show import print_json, print_table
from compress.recipe.tables import ResultTable


@click.command()
@click.argument("model")
@click.option("--against", metavar="BASE", help="Another model, measured in turns with MODEL.")
@DTYPE
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="Decode with torch.compile where steps are not traced; needs a C++ compiler.",
)
@click.option("--activations", type=click.Choice(["int8"]), help="Round the inputs of layers of integer codes: faster.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(model: str, against: str | None, dtype: str, compiled: bool, activations: str | None, as_json: bool) -> None:
    """Measure the speed of MODEL, a compressed checkpoint or any other model: loading, memory, decoding, prefill."""
    from compress.evaluation import speed
    from compress.pipeline.progress import Waiting
    from compress.results.measurements.speed import table

    with Waiting(f"measuring the speed of {model}") as waiting:
        result = speed.bench(model, against, dtype, compiled, activations, waiting.count)
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    bandwidth = f"{result.read_bandwidth / 1e9:.1f} GB/s"
    title = f"{result.instruction_set} kernels, threads: {result.threads}, read bandwidth: {bandwidth}"
    print_table(ResultTable(title, ("", *result.models), table(result)))
