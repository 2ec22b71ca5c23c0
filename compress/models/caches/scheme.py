"""CacheScheme: the description of how an attention's keys and values are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from compress.layers.fields import read_grid
from compress.numerics.quant.grids import Grid

Transformed = Literal["keys", "values", "both"]
"""What of a cache is rounded after a Hadamard transform."""


def _grid_name(grid: Grid | None) -> str | None:
    return None if grid is None else grid.name


@dataclass(frozen=True)
class CacheScheme:
    """How an attention's keys and values are rounded as they enter its cache: the grid of each, None: not rounded.

    scale: 'token': one per token and head, computed when the model runs; 'static': one for all keys and one for all
    values, computed in calibration. symmetric: False adds a zero point to each scale of kind 'token'. key_group: with
    'token', the number of consecutive tokens whose keys share one scale per channel in place of one per token and head
    (KIVI); they are rounded when the group is complete. residual: the number of latest tokens that are not rounded.
    hadamard: what is rounded after a Hadamard transform of every head and transformed back; None: nothing.
    """

    keys: Grid | None
    values: Grid | None
    scale: Literal["token", "static"] = "token"
    symmetric: bool = True
    key_group: int | None = None
    residual: int = 0
    hadamard: Transformed | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, grids by name; the last three fields only where they are not their defaults."""
        grids = {"keys": _grid_name(self.keys), "values": _grid_name(self.values)}
        later = {"key_group": self.key_group} if self.key_group is not None else {}
        later |= {"residual": self.residual} if self.residual else {}
        later |= {"hadamard": self.hadamard} if self.hadamard is not None else {}
        return {**grids, "scale": self.scale, "symmetric": self.symmetric, **later}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CacheScheme:
        """The inverse of to_json. Raises ValueError for an unknown grid, and for a missing or wrong field."""
        names = ("keys", "values", "scale", "symmetric")
        later = {"key_group": None, "residual": 0, "hadamard": None}
        if not isinstance(values, Mapping) or values.keys() - later != set(names):
            raise ValueError(f"{str(values)[:100]!r} describes no rounding of keys and values: {', '.join(names)}")
        if values["scale"] not in ("token", "static") or not isinstance(values["symmetric"], bool):
            raise ValueError(f"{str(values)[:100]!r} has a scale other than token and static, or no bool as symmetric")
        group, residual, hadamard = (values.get(name, default) for name, default in later.items())
        known = group is None or (type(group) is int and group > 1 and values["scale"] == "token")
        if not known or type(residual) is not int or residual < 0:
            raise ValueError(
                f"{str(values)[:140]!r} has an invalid key_group, or a residual that is no number of tokens"
            )
        if hadamard not in (None, *get_args(Transformed)):
            raise ValueError(f"{str(values)[:140]!r} has a hadamard other than {', '.join(get_args(Transformed))}")
        grids = read_grid(values["keys"]), read_grid(values["values"])
        return cls(*grids, values["scale"], values["symmetric"], group, residual, hadamard)

    @property
    def grids(self) -> tuple[Grid | None, Grid | None]:
        """The grids of keys and of values."""
        return self.keys, self.values

    @property
    def groups(self) -> tuple[int | None, int | None]:
        """The tokens that share one scale per channel, of keys and of values; None: a scale per token and head."""
        return self.key_group, None

    @property
    def transformed(self) -> tuple[bool, bool]:
        """Whether keys, and whether values, are rounded after a Hadamard transform."""
        return self.hadamard in ("keys", "both"), self.hadamard in ("values", "both")

    @property
    def late(self) -> bool:
        """Whether some tokens are rounded only after later ones entered the cache."""
        return self.key_group is not None or self.residual > 0

    @property
    def static(self) -> tuple[bool, bool]:
        """Whether keys, and whether values, have a static scale."""
        return self.keys is not None and self.scale == "static", self.values is not None and self.scale == "static"

    def token_bytes(self, grid: Grid | None, heads: int, width: int, itemsize: int, group: int | None = None) -> float:
        """Bytes of the keys, or the values, of a token on one of `grids`, with scales and zero points.

        itemsize: bytes of a float. group: of `groups`. Tokens that are not rounded yet do not count.
        """
        if grid is None:
            return heads * width * itemsize
        overhead = itemsize + (0 if self.symmetric else grid.bits / 8) if self.scale == "token" else 0
        return heads * (width * grid.bits / 8 + overhead * (1 if group is None else width / group))
