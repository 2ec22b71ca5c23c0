"""Read the fields of schemes from JSON, and validate them by their annotations."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, get_origin, get_type_hints

from pydantic import ConfigDict, InstanceOf, TypeAdapter

from compress.errors import did_you_mean
from compress.numerics.dtypes import DTYPES
from compress.numerics.quant.grids import GRIDS, Grid


def read_grid(name: Any) -> Grid | None:
    """Look up a grid by name; None stays None.

    Raises:
        ValueError: for an unknown name.
    """
    if name is not None and (not isinstance(name, str) or name not in GRIDS):
        raise ValueError(f"grid {name!r} is not known{did_you_mean(str(name), GRIDS)}")
    return None if name is None else GRIDS[name]


def read_dtype(name: Any) -> str | None:
    """Check the name of a float dtype; None stays None.

    Raises:
        ValueError: for an unknown name.
    """
    if name is not None and (not isinstance(name, str) or name not in DTYPES):
        raise ValueError(f"dtype {name!r} is not known{did_you_mean(str(name), DTYPES)}")
    return name


@cache
def validators(kind: type[Any]) -> dict[str, TypeAdapter[Any]]:
    """Return a validator of each field of a dataclass, built from its annotation."""
    hints = get_type_hints(kind)
    return {f.name: _validator(hints[f.name]) for f in fields(kind)}


def _validator(hint: Any) -> TypeAdapter[Any]:
    """Build a validator of an annotation. Grids and schemes must be instances; their fields are not validated."""
    is_plain_class = (
        isinstance(hint, type) and get_origin(hint) is None
    )  # Python 3.10 also takes `tuple[int, int]` for a type
    if is_plain_class and not issubclass(hint, (str, int, float)):
        instance: Any = InstanceOf
        return TypeAdapter(instance[hint])
    return TypeAdapter(hint, config=ConfigDict(strict=True))
