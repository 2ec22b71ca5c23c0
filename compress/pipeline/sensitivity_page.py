"""Sensitivities as an HTML page: a heat map for each choice, and a table of the most sensitive layers."""

from __future__ import annotations

from compress.pipeline.sensitivity import Sensitivities, Sensitivity
from compress.report.depth import heat_map
from compress.report.html import short_name
from compress.report.page.blocks import Block, Heading, Prose, Table
from compress.report.page.numbers import number, with_error
from compress.report.page.render import Part, page

SHOWN = 20  # rows of the table; the JSON file has all


def html(found: Sensitivities) -> str:
    """The text of the page."""
    text = (
        f"KL divergence from the model when one {found.level} alone is changed, in nats per token, on {found.windows} "
        f"windows of {found.length} tokens of {found.text}. Colors follow the logarithm. Layers interact: this says "
        "where to spend bits, not what the result will be."
    )
    maps: list[Block] = [Prose(text)]
    for choice in found.choices:
        own = [one for one in found.found if one.choice == choice]
        heat = heat_map(((one.name, one.kl) for one in own), log=True)
        total = f"{number(sum(one.kl for one in own))} nats over all {found.level}s"
        maps += [Heading(choice, total), *([] if heat is None else [heat])]
    worst = sorted(found.found, key=lambda one: -one.kl)[:SHOWN]
    table = Table((found.level, "choice", "bits", "KL", "loss"), [_row(one) for one in worst], frozenset({1}))
    parts = [Part("maps", "", maps), Part("worst", f"The most sensitive {found.level}s", [table])]
    return page(f"Sensitivity of {short_name(found.model)}", "compress sensitivity", parts)


def _row(one: Sensitivity) -> tuple[str, ...]:
    errors = with_error(one.kl, one.kl_stderr), with_error(one.loss, one.loss_stderr, "+")
    return (one.name, one.choice, number(one.bits), *errors)
