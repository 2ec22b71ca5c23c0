"""`compress sensitivity`: the KL divergence of each choice in each layer alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from compress.cli.group import without_collection
from compress.cli.options import DEVICE, DTYPE
from compress.cli.paths import UserPath
from compress.cli.show import echo, print_json, print_table
from compress.recipe.tables import SHOWN, ResultTable

if TYPE_CHECKING:
    from compress.recipe.sensitivities import Sensitivities


@click.command()
@click.argument("model")
@click.option(
    "--choice",
    "choices",
    multiple=True,
    required=True,
    metavar="CHOICE",
    help="A grid (int4: rounding to nearest), a sparsity (0.5 or 2:4: Wanda), or a pass as in a recipe, such as "
    "'gptq: {weights: int3}'; repeatable.",
)
@click.option(
    "--by",
    "level",
    type=click.Choice(["layer", "block"]),
    default="layer",
    show_default=True,
    help="Change one linear, or all linears of one block, at a time.",
)
@click.option("--text", default="embedded", show_default=True, help="Text: embedded, wikitext, or a file.")
@click.option(
    "--windows",
    type=click.IntRange(min=2),
    default=8,
    show_default=True,
    help="Windows of the text, or all if it has fewer.",
)
@click.option("--length", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens per window.")
@click.option("--bits", type=float, help="Also print the pass that spends this many bits per weight best.")
@DTYPE
@DEVICE
@click.option(
    "--work",
    type=UserPath(),
    default=Path("out/sensitivity"),
    show_default=True,
    help="Folder of kept results: a killed measurement continues.",
)
@click.option(
    "-o",
    "--out",
    type=UserPath(),
    help="Also write the results to this .json file, or a page with heat maps to this .html file.",
)
@click.option("--all", "all_layers", is_flag=True, help="A row for every layer, not for the most sensitive ones alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sensitivity(
    model: str,
    choices: tuple[str, ...],
    level: Literal["layer", "block"],
    text: str,
    windows: int,
    length: int,
    bits: float | None,
    dtype: str,
    device: str,
    work: Path,
    out: Path | None,
    all_layers: bool,
    as_json: bool,
) -> None:
    """Measure each CHOICE in each layer of MODEL alone: KL divergence from MODEL, in nats per token.

    The model is in memory twice. Layers interact; the table says where to spend bits, not what the result will be.
    """
    with without_collection():
        from compress.checkpoint.containers.files import check_output_file
        from compress.pipeline.sensitivity import allocate
        from compress.pipeline.sensitivity import sensitivity as measure
        from compress.report.sensitivity import SUFFIXES
    if out is not None:
        check_output_file(out, SUFFIXES)
    sensitivities = measure(
        model,
        choices,
        level=level,
        text=text,
        windows=windows,
        length=length,
        dtype=dtype,
        device=device,
        work=work,
        progress=True,
    )
    allocated = None if bits is None else allocate(sensitivities, bits)
    spelled = None
    if allocated is not None:
        spelled = {type(allocated).key(): allocated.model_dump(mode="json", exclude_defaults=True)}
    if as_json:
        print_json(sensitivities.model_dump(mode="json") | ({} if spelled is None else {"passes": [spelled]}))
    else:
        _print(sensitivities, all_layers)
    if spelled is not None and not as_json:
        import yaml

        echo(yaml.safe_dump({"passes": [spelled]}, sort_keys=False, width=120), nl=False)
    if out is not None:
        sensitivities.save(out)


def _print(sensitivities: Sensitivities, all_layers: bool) -> None:
    """Print the kinds and the most sensitive layers, or all layers in the order of the model."""
    by_kind, by_layer = sensitivities.tables()
    if not all_layers:
        print_table(by_kind)
        print_table(by_layer._replace(rows=by_layer.rows[:SHOWN]))
        return
    order = {name: place for place, name in enumerate(sensitivities.by_name())}
    rows = sorted(by_layer.rows, key=lambda row: order[row[0]])
    print_table(ResultTable(f"all {sensitivities.level}s: KL ± standard error", by_layer.head, rows))
