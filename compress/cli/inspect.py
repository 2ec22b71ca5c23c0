"""`compress inspect`: what is in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compress.cli.show import print_json, print_table

if TYPE_CHECKING:
    from compress.checkpoint.inspection import Inspection, Module


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="A row for every module instead of every kind of module.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
@click.option("--values", is_flag=True, help="Read the weights too, to count zeros.")
@click.option("--verify", is_flag=True, help="First compare the sha256 of every file with SHA256SUMS.")
def inspect(path: Path, every: bool, as_json: bool, values: bool, verify: bool) -> None:
    """Show what is in the checkpoint at PATH: a folder, a .safetensors file or a .gguf file of any program."""
    from compress.checkpoint.containers.digests import SUMS
    from compress.checkpoint.inspection import inspect as inspect_checkpoint

    if verify:
        _verify(path)
    found = inspect_checkpoint(path, values)
    if as_json:
        print_json(found.to_json())
        return
    _print(found, every)
    if verify:
        click.echo(f"files: all as {SUMS} says")


def _verify(path: Path) -> None:
    """Print a line for each damaged file, and raise ModelError if there is one."""
    from compress.checkpoint.containers.digests import damaged
    from compress.errors import ModelError

    found = damaged(path)
    for name, reason in found.items():
        click.echo(f"{path / name} {reason}", err=True)
    if found:
        raise ModelError(f"model: {len(found)} files of {path} are not as they were written; fetch them again")


def _print(found: Inspection, every: bool) -> None:
    columns: dict[str, Callable[[Module], str]] = {
        "module" if every else "modules": lambda m: m.name,
        "count": lambda m: f"{m.count}",
        "shape": lambda m: "?" if m.shape is None else " x ".join(map(str, m.shape)),
        "stored as": lambda m: m.stored_as,
        "bits/weight": lambda m: f"{m.bits_per_weight:.2f}",
        "dtypes": lambda m: " ".join(m.dtypes),
        "zeros": lambda m: "" if m.zeros is None else f"{m.zeros:.1%}",
        "bytes": lambda m: f"{m.size_bytes}",
    }
    if every:
        del columns["count"]
    if all(module.zeros is None for module in found.modules):
        del columns["zeros"]
    modules = found.modules if every else found.groups()
    print_table("", tuple(columns), [tuple(text(module) for text in columns.values()) for module in modules])
    for note in found.notes:
        click.echo(f"note: {note}")
    click.echo(f"{found.source}: {found.method}; {len(found.modules)} modules in {len(found.files)} files")
    click.echo(
        f"weights: {found.weights}, bytes: {found.size_bytes} ({sum(found.files.values())} in the files), "
        f"bits per weight: {found.bits_per_weight:.2f}"
    )
