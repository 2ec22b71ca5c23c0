"""`compress compare`: a table of variants of one model, and the Pareto plot of size against loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compress.cli.eval import print_evaluation, settings_of, settings_options
from compress.cli.options import DEVICE, DTYPE
from compress.cli.paths import UserPath
from compress.cli.show import print_json, print_sentence, print_table


@click.command("compare")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--measure", is_flag=True, help="Measure all models now instead of reading their reports.")
@click.option("--base", help="Uncompressed model to measure against; implies --measure.")
@settings_options
@DTYPE
@DEVICE
@click.option("--work", type=UserPath(), default=Path("out/evaluation"), help="Folder of kept results.")
@click.option(
    "-o",
    "--out",
    type=UserPath(),
    help="Write the Pareto plot to this .svg file, or a page to this .html file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(
    models: tuple[str, ...],
    measure: bool,
    base: str | None,
    dtype: str,
    device: str,
    work: Path,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare MODELs, variants of one model, by size and loss: from their reports, or measured now."""
    from compress.checkpoint.containers.files import check_output_file, write_text
    from compress.report.pareto import Variants
    from compress.results.gate import check_models

    if out is not None:
        check_output_file(out, (".svg", ".html"))
    if measure or base is not None:
        from compress.pipeline.compare import compare as measured

        variants = measured(
            models,
            base,
            settings_of(options),
            work=work,
            dtype=dtype,
            device=device,
            progress=True,
            on_failure=print_evaluation,
        )
    else:
        variants = Variants.from_reports([Path(model) for model in models])
    if as_json:
        print_json([variant.model_dump() for variant in variants.models])
    else:
        print_table(variants.table())
        for sentence in variants.verdicts():
            print_sentence(sentence)
    if out is not None:
        write_text(out, variants.html() if out.suffix == ".html" else str(variants.picture()))
    if variants.comparison is not None:
        check_models(variants.comparison)
