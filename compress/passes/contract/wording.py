"""Messages about options in terms of the recipe. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compress.errors import RecipeError, did_you_mean

Place = tuple[str | int, ...]
"""A place in a recipe: ('passes', 1, 'gptq', 'group_size')."""

SYNONYMS = {
    "bits": ("weights", "int{value}"),
    "nbits": ("weights", "int{value}"),
    "wbits": ("weights", "int{value}"),
    "num_bits": ("weights", "int{value}"),
    "dtype": ("weights", "{value}"),
    "sym": ("symmetric", "{value}"),
    "zero_point": ("symmetric", "false"),
    "desc_act": ("act_order", "static"),
    "actorder": ("act_order", "{value}"),
    "damp_percent": ("damping", "{value}"),
    "percdamp": ("damping", "{value}"),
    "dampening_frac": ("damping", "{value}"),
    "mask_structure": ("pattern", "{value}"),
    "prunen": ("pattern", '"2:4"'),
    "exclude": ("ignore", "{value}"),
    "modules_to_not_convert": ("ignore", "{value}"),
    "lr": ("learning_rate", "{value}"),
}
"""Names of options in other libraries, the option here with the same purpose, and a value of it."""


def place_text(place: Place) -> str:
    """A place in words: 'overrides[1] group_size'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f" {part}" for part in place).strip()


def recipe_error(path: Place, message: str) -> RecipeError:
    """The error for a mistake at a place in the recipe's data."""
    where = place_text(path)
    return RecipeError(f"{where}: {message}" if where else message, path)


def unknown_option(name: str, known: Iterable[str], value: Any = None) -> str:
    """The message for an option that does not exist, with the nearest known one. value: as given, for a hint."""
    known = set(known)
    meant, spelled = SYNONYMS.get(name, ("", ""))
    if meant not in known:
        return f"unknown option{did_you_mean(name, known)}"
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"unknown option; did you mean {meant!r}? Write {meant}: {spelled.format(value=shown)}"
