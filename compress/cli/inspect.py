"""`compress inspect`: what is in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compress.cli.paths import UserPath
from compress.cli.show import echo, print_json, print_sentence, print_table
from compress.recipe.tables import ResultTable, megabytes

if TYPE_CHECKING:
    from compress.checkpoint.inspected import Inspection, Module


@click.command("inspect")
@click.argument("path", type=UserPath())
@click.option("--all", "all_modules", is_flag=True, help="A row for every module instead of every kind of module.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
@click.option("--values", is_flag=True, help="Read the weights too, to count zeros.")
@click.option("--verify", is_flag=True, help="First compare the sha256 of every file with SHA256SUMS.")
def inspect(path: Path, all_modules: bool, as_json: bool, values: bool, verify: bool) -> None:
    """Show what is in the checkpoint at PATH: a folder, a .safetensors file or a .gguf file of any program."""
    from compress.checkpoint.containers.digests import SUMS, damaged
    from compress.checkpoint.inspection import inspect as inspect_checkpoint
    from compress.pipeline.progress import Waiting

    if verify:
        with Waiting(f"reading the files of {path}"):
            reason_by_file = damaged(path)
        _check(path, reason_by_file)
    with Waiting(f"reading {'the weights' if values else 'the headers'} of {path}"):
        inspection = inspect_checkpoint(path, values)
    if as_json:
        print_json(inspection.to_json())
        return
    _print(inspection, all_modules)
    if verify:
        echo(f"files: all as {SUMS} says")


def _check(path: Path, reason_by_file: Mapping[str, str]) -> None:
    """Print a line for each damaged file, and raise ModelError if there is one."""
    from compress.errors import ModelError

    for name, reason in reason_by_file.items():
        echo(f"{path / name} {reason}", err=True)
    if reason_by_file:
        raise ModelError(f"model: {len(reason_by_file)} files of {path} are not as they were written; fetch them again")


def _print(inspection: Inspection, all_modules: bool) -> None:
    columns: dict[str, Callable[[Module], str]] = {
        "module" if all_modules else "modules": lambda m: m.name,
        "count": lambda m: f"{m.count}",
        "shape": lambda m: "?" if m.shape is None else " x ".join(map(str, m.shape)),
        "stored as": lambda m: m.stored_as,
        "bits/weight": lambda m: f"{m.bits_per_weight:.2f}",
        "dtypes": lambda m: " ".join(m.dtypes),
        "zeros": lambda m: "" if m.zeros is None else f"{m.zeros:.1%}",
        "MB": lambda m: megabytes(m.size_bytes),
    }
    if all_modules:
        del columns["count"]
    if all(module.zeros is None for module in inspection.modules):
        del columns["zeros"]
    modules = inspection.modules if all_modules else inspection.groups()
    print_table(
        ResultTable("", tuple(columns), [tuple(text(module) for text in columns.values()) for module in modules])
    )
    for note in inspection.notes:
        print_sentence(f"note: {note}")
    echo(
        f"{inspection.source}: {inspection.method}; {len(inspection.modules)} modules in {len(inspection.files)} files"
    )
    file_bytes = sum(inspection.files.values())
    sizes = f"{megabytes(inspection.size_bytes)} MB ({megabytes(file_bytes)} MB in the files)"
    print_sentence(f"weights: {inspection.weights}, {sizes}, bits per weight: {inspection.bits_per_weight:.2f}")
