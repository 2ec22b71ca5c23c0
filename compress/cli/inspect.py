"""`compress inspect`: what is in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compress.cli.show import print_json, print_table

if TYPE_CHECKING:
    from compress.model.inspection import Inspection


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="A row for every module instead of every kind of module.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
@click.option("--values", is_flag=True, help="Read the weights too, to count zeros.")
@click.option("--verify", is_flag=True, help="First compare the sha256 of every file with SHA256SUMS.")
def inspect(path: Path, every: bool, as_json: bool, values: bool, verify: bool) -> None:
    """Show what is in the checkpoint at PATH: a folder, a .safetensors file or a .gguf file of any program."""
    from compress.formats.containers.digests import SUMS
    from compress.model.inspection import inspect as inspect_checkpoint

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
    from compress.errors import ModelError
    from compress.formats.containers.digests import damaged

    found = damaged(path)
    for name, reason in found.items():
        click.echo(f"{path / name} {reason}", err=True)
    if found:
        raise ModelError(f"model: {len(found)} files of {path} are not as they were written; fetch them again")


def _print(found: Inspection, every: bool) -> None:
    head = ("module", "shape", "stored as", "bits/weight", "dtypes", "bytes")
    zeros = any(module.zeros is not None for module in found.modules)
    rows = []
    for module in found.modules if every else found.groups():
        shape = "?" if module.shape is None else " x ".join(str(n) for n in module.shape)
        row = (module.name, shape, module.stored_as, f"{module.bits_per_weight:.2f}", " ".join(module.dtypes))
        share = ("" if module.zeros is None else f"{module.zeros:.1%}",) if zeros else ()
        count = () if every else (f"{module.count}",)
        rows.append((row[0], *count, *row[1:], *share, f"{module.size_bytes}"))
    head = (*head[:-1], *(("zeros",) if zeros else ()), head[-1])
    print_table("", head if every else ("modules", "count", *head[1:]), rows)
    for note in found.notes:
        click.echo(f"note: {note}")
    bits = found.size_bytes * 8 / max(1, found.weights)
    click.echo(f"{found.source}: {found.method}; {len(found.modules)} modules in {len(found.files)} files")
    click.echo(f"weights: {found.weights}, bytes: {found.size_bytes} ({sum(found.files.values())} in the files), "
               f"bits per weight: {bits:.2f}")  # fmt: skip
