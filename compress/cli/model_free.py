"""`compress quantize --model-free`: quantize the tensors of a folder without the class of its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from compress.cli.group import without_collection
from compress.cli.show import echo, print_json, print_table

SPELLED = {"sets": "set", "texts": "eval", "limits": "fail-if", "formats": "format"}
"""Options by the names of their parameters, where these have another word."""


def check_model_free(options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option of a run, which has no effect without a model.

    Args:
        options: values of such options by the names of their parameters.
    """
    for name, value in options.items():
        if value and name != "device":
            option = SPELLED.get(name, name).replace("_", "-")
            raise click.UsageError(
                f"--{option} has no effect with --model-free, which builds no model and reads no text"
            )


def quantize_tensors(source: str, scheme: str | None, out: Path | None, options: Any, as_json: bool) -> None:
    """Quantize a folder and print the result."""
    with without_collection():
        from compress.pipeline.model_free import quantize_folder
        from compress.pipeline.progress import Waiting

    with Waiting(f"quantizing the tensors of {source}") as waiting:
        result = quantize_folder(source, scheme, out, **options, progress=waiting.count)
    if as_json:
        print_json({"folder": str(result.folder), **result.to_json()})
        return
    for part in result.tables():
        print_table(part)
    for note in result.notes:
        echo(f"note: {note}")
    echo("nothing was verified by running the model; its quality was not measured")
    echo(f"checkpoint: {result.folder}, model card: {result.folder / 'README.md'}")
