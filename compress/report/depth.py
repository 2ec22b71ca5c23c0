"""Layers by kind and depth: the kind is a layer's name without the number of its block, the depth is that number."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from compress.report.charts import HeatMap

NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
BLOCK = "block"


def kind_and_depth(layer: str) -> tuple[str, int | None]:
    """Split the name of a layer: 'model.layers.3.mlp.down_proj' is ('mlp.down_proj', 3).

    Returns:
        The kind, in which later numbers, of experts, are '*', and 'block' for a block itself; the depth, which is None
        for a layer outside of blocks.
    """
    match = NUMBER.search(layer)
    if match is None:
        return layer, None
    return NUMBER.sub(".*", layer[match.end() :].lstrip(".")) or BLOCK, int(match[1])


def by_kind(values: Iterable[tuple[str, float]]) -> dict[str, dict[int, float]]:
    """Average pairs (layer, value) by kind and depth; layers outside of blocks are left out."""
    lists: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for layer, value in values:
        kind, depth = kind_and_depth(layer)
        if depth is not None:
            lists[kind][depth].append(value)
    return {
        kind: {depth: sum(items) / len(items) for depth, items in sorted(by_depth.items())}
        for kind, by_depth in lists.items()
    }


def heat_map(title: str, values: Iterable[tuple[str, float]], quantity: str, is_log: bool = False) -> HeatMap | None:
    """Draw means of pairs (layer, value) by kind and depth.

    Args:
        title: Of the chart.
        values: Pairs (layer, value).
        quantity: The quantity and its unit.
        is_log: The colors follow the logarithm.

    Returns:
        None for fewer than two depths.
    """
    kinds = by_kind(values)
    depths = sorted({depth for means in kinds.values() for depth in means})
    rows = [[means.get(depth) for depth in depths] for means in kinds.values()]
    if len(depths) < 2:
        return None
    return HeatMap(title, list(kinds), [str(depth) for depth in depths], rows, BLOCK, quantity, is_log)
