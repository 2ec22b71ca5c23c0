"""Layers by kind and depth: the kind is a layer's name without the number of its block, the depth is that number."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from compress.report.page.charts import Heat

NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
BLOCK = "block"


def kind_and_depth(layer: str) -> tuple[str, int | None]:
    """('mlp.down_proj', 3) of 'model.layers.3.mlp.down_proj', and ('block', 3) of 'model.layers.3'.

    Later numbers, of experts, become '*'. The depth of a layer outside of blocks is None.
    """
    found = NUMBER.search(layer)
    if found is None:
        return layer, None
    return NUMBER.sub(".*", layer[found.end() :].lstrip(".")) or BLOCK, int(found[1])


def by_kind(values: Iterable[tuple[str, float]]) -> dict[str, dict[int, float]]:
    """Means by depth of (layer, value), by kind; layers outside of blocks are left out."""
    lists: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for layer, value in values:
        kind, depth = kind_and_depth(layer)
        if depth is not None:
            lists[kind][depth].append(value)
    return {kind: _means(depths) for kind, depths in lists.items()}


def _means(depths: Mapping[int, list[float]]) -> dict[int, float]:
    return {depth: sum(found) / len(found) for depth, found in sorted(depths.items())}


def heat_map(values: Iterable[tuple[str, float]], log: bool = False) -> Heat | None:
    """Means of (layer, value) as a heat map of kinds by depth; None for fewer than two depths."""
    kinds = by_kind(values)
    depths = sorted({depth for found in kinds.values() for depth in found})
    rows = [[found.get(depth) for depth in depths] for found in kinds.values()]
    return Heat(list(kinds), [str(depth) for depth in depths], rows, BLOCK, log=log) if len(depths) > 1 else None
