"""`compress export`: write a checkpoint in another format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from compress.cli.complete import complete_export_format
from compress.cli.group import without_collection
from compress.cli.paths import UserPath
from compress.cli.show import echo, print_json, print_table
from compress.recipe.tables import ResultTable


@click.command()
@click.argument("folder", type=UserPath())
@click.option(
    "--format",
    "form",
    required=True,
    shell_complete=complete_export_format,
    help="Format to write, as save.format of a recipe, or onnx or openvino.",
)
@click.option("-o", "--out", type=UserPath(), required=True, help="Output folder, new or empty.")
@click.option("--requantize", is_flag=True, help="Round weights again where the format cannot store their codes.")
@click.option("--dtype", default="auto", help="Dtype of dense tensors; auto: that of the checkpoint.")
@click.option(
    "--type",
    default="auto",
    help="With --format gguf and a dense or pruned model: F32, F16, BF16 or Q8_0; auto: that of --dtype.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export(folder: Path, form: str, out: Path, requantize: bool, dtype: str, type: str, as_json: bool) -> None:
    """Write the checkpoint in FOLDER in another format, without calibration.

    Codes stay as they are, bit for bit; a format that cannot store them is refused unless --requantize is given.
    Formats gguf, onnx and openvino also take dense and pruned models. Format onnx is for ONNX Runtime GenAI, by its
    model builder, and openvino by optimum-intel (extras of the same names); the result runs once.
    """
    with without_collection():
        from compress.pipeline.convert import ExportOptions  # slow: imports torch, which --help does not need
        from compress.pipeline.exporting import export_checked
        from compress.pipeline.progress import Waiting

    options = ExportOptions(requantize, dtype, type=type)
    with Waiting(f"converting {folder} to {out}"):
        kinds, check = export_checked(folder, out, form, options)
    if as_json:
        checked = {} if check is None else {"check": asdict(check)}
        print_json({"folder": str(out), "format": form, "layers": [asdict(kind) for kind in kinds], **checked})
        return
    rows = [
        (kind.name, str(kind.count), kind.before, kind.after, f"{kind.error:.3e}" if kind.error else "0 (lossless)")
        for kind in kinds
    ]
    if rows:
        print_table(ResultTable(f"{folder} -> {out}", ("layers", "count", "before", "after", "weight error"), rows))
    if any(kind.error and kind.before == kind.after for kind in kinds):
        echo(f"note: format {form} fixes the dtype of scales, so they were rounded to it; the codes are unchanged")
    if check is not None:
        echo(f"check: {check.text}")
    echo(f"checkpoint: {out}, model card: {out / 'README.md'}")
