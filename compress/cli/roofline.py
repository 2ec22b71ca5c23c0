"""`compress roofline`: the least latency of a model on a device, before and after compression."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compress.cli.complete import complete_device, complete_recipe
from compress.cli.group import without_collection
from compress.cli.show import print_json, print_sentence, print_table
from compress.recipe.shipped import SUFFIXES, shipped
from compress.recipe.tables import ResultTable, megabytes

if TYPE_CHECKING:
    from compress.pipeline.rooflines import Roofline
    from compress.roofline.estimate import PassCost, ProductCost

HEAD = ("products", "count", "operations", "bytes", "op/byte", "bound by", "us of all")
"""Of one product, but the microseconds; 'before -> after' where a run changes them."""


@click.command()
@click.argument("subject", required=False, metavar="MODEL|FOLDER|RECIPE", shell_complete=complete_recipe)
@click.option(
    "--on",
    default="A100-80GB",
    show_default=True,
    metavar="DEVICE",
    shell_complete=complete_device,
    help="A known device, '{tflops: ..., gbps: ..., memory_gb: ...}', or here: this machine, measured.",
)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences computed together.")
@click.option("--context", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of each prompt.")
@click.option(
    "--devices",
    "listed",
    is_flag=True,
    help="List the known devices, and estimate nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def roofline(subject: str | None, on: str, batch: int, context: int, listed: bool, as_json: bool) -> None:
    """Estimate the latency of a model, a compressed checkpoint, or the model of a recipe before and after its run.

    Each product takes the time of its operations or of the bytes that it moves, whichever is longer (roofline model).
    No weights are read. A real program is slower; ratios say more than seconds.
    """
    if listed:
        _list(as_json)
        return
    if subject is None:
        raise click.UsageError("write a MODEL, FOLDER or RECIPE, or --devices")
    is_recipe = Path(subject).suffix in SUFFIXES or (subject in shipped() and not Path(subject).is_dir())
    if is_recipe:
        from compress.recipe.names import check_file

        check_file(subject)
    with without_collection():
        from compress.pipeline.progress import Waiting
        from compress.pipeline.rooflines import roofline as estimate
        from compress.recipe.schema import Recipe
    source = Recipe.from_yaml(subject) if is_recipe else subject
    with Waiting(f"measuring this machine, and estimating {subject}" if on == "here" else f"estimating {subject}"):
        estimated = estimate(source, on, batch, context)
    if as_json:
        print_json(estimated.to_json())
        return
    title = f"{estimated.device.name}, batch {batch}, context {context}"
    print_table(_table(f"prefill: {title}", estimated.before.prefill, estimated.after and estimated.after.prefill))
    if estimated.before.decode is not None:
        after = estimated.after and estimated.after.decode
        print_table(_table(f"decode one token: {title}", estimated.before.decode, after))
    for line in _totals(estimated):
        print_sentence(line)


def _list(as_json: bool) -> None:
    from compress.roofline.devices import devices

    if as_json:
        print_json([asdict(device) for device in devices().values()])
        return
    kinds = list(dict.fromkeys(kind for device in devices().values() for kind in device.rates))
    rows = [
        (
            name,
            *(f"{device.rates[kind] / 1e12:g}" if kind in device.rates else "" for kind in kinds),
            f"{device.bandwidth / 1e9:g}",
            f"{device.memory / 1e9:g}",
        )
        for name, device in devices().items()
    ]
    head = ("device", *(f"{kind}, 10^12/s" for kind in kinds), "GB/s", "GB")
    print_table(ResultTable("", head, rows))


def _table(title: str, original: PassCost, compressed: PassCost | None) -> ResultTable:
    """Return a table with a row for each kind of product."""
    later = {cost.name: cost for cost in (compressed or original).costs}
    rows = []
    for cost in original.costs:
        pairs = zip(_cells(cost), _cells(later[cost.name]) if cost.name in later else ("none",) * 6, strict=True)
        rows.append((cost.name, *(old if old == new else f"{old} -> {new}" for old, new in pairs)))
    return ResultTable(title, HEAD, rows)


def _cells(cost: ProductCost) -> tuple[str, ...]:
    operations, size = cost.operations / cost.count, cost.size_bytes / cost.count
    rates = f"{cost.intensity:.3g}", cost.bound, f"{cost.seconds * 1e6:.4g}"
    return f"{cost.count}", shortened(operations), shortened(size), *rates


def _totals(estimated: Roofline) -> list[str]:
    sides = [side for side in (estimated.before, estimated.after) if side is not None]
    lines = ["prefill: " + " -> ".join(f"{side.prefill.seconds * 1e3:.3g} ms" for side in sides)]
    steps = [side.decode.seconds for side in sides if side.decode is not None]
    if steps:
        rates = " -> ".join(shortened(estimated.batch / seconds) for seconds in steps)
        lines.append(
            f"decode: {' -> '.join(f'{seconds * 1e3:.3g} ms' for seconds in steps)} per token, {rates} tokens/s"
        )
    else:
        lines.append("decode: none; the model keeps no cache of keys and values")
    weights = " -> ".join(in_bytes(side.weight_bytes) for side in sides)
    cache, memory = in_bytes(sides[-1].cache_bytes), estimated.device.memory
    fits = " -> ".join(dict.fromkeys("fits" if s.memory_bytes <= memory else "does not fit" for s in sides))
    lines.append(f"memory: weights {weights}, KV cache {cache}; {fits} in {memory / 1e9:.3g} GB")
    lines += [
        f"KV cache: {policy} is simulated; the figures are those of an exact cache" for policy in estimated.simulated
    ]
    return lines


def in_bytes(size_bytes: float) -> str:
    """Format a size with three digits, in MB below one GB: 2.44 MB, 13.5 GB."""
    return f"{megabytes(size_bytes)} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:.3g} GB"


def shortened(number: float) -> str:
    """Format a number with three digits and a unit: 68.7G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
