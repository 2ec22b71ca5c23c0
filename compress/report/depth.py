"""Layers by kind and depth: the kind is a layer's name without the number of its block, the depth is that number."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

NUMBER = re.compile(r"(?:^|\.)(\d+)\.")


def kind_and_depth(layer: str) -> tuple[str, int | None]:
    """('mlp.down_proj', 3) of 'model.layers.3.mlp.down_proj'; later numbers, of experts, become '*'."""
    found = NUMBER.search(layer)
    if found is None:
        return layer, None
    return NUMBER.sub(".*.", layer[found.end() :]), int(found[1])


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
