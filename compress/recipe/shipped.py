"""The recipes that come with the package, by name: `compress run best-int4 --model MODEL`. Imports nothing slow.

They are the folder recipes/ of the repository, which the wheel holds as `compress/recipe/recipes/` (pyproject.toml). In
a working tree and in an editable installation they are read from the repository.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from compress.errors import RecipeError, did_you_mean

INSTALLED = Path(__file__).with_name("recipes")
SOURCES = Path(__file__).parents[2] / "recipes"
SUFFIXES = (".yaml", ".yml")


@cache
def shipped() -> dict[str, Path]:
    """Return the file of every shipped recipe by name."""
    folder = INSTALLED if INSTALLED.is_dir() else SOURCES
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def summary_of(path: Path) -> str:
    """Return the purpose of a recipe: its first line, without the comment sign."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def steps_of(path: Path) -> list[Any]:
    """Return the passes of a recipe as its file spells them."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))["passes"]


def find_recipe(word: str | Path) -> Path:
    """Return the file of a recipe: an existing file, or else a shipped recipe.

    A word that ends in .yaml or .yml, or has a slash, is always a file.

    Raises:
        RecipeError: if the word is neither.
    """
    path, name = Path(word), str(word)
    if path.is_file():
        return path
    path_by_name = shipped()
    if name in path_by_name:
        return path_by_name[name]
    if path.suffix in SUFFIXES or "/" in name or "\\" in name:
        if path.stem in path_by_name and not path.exists():
            raise RecipeError(f"{name}: there is no such file; {path.stem!r} alone is the shipped recipe of this name")
        return path  # reading it says what is wrong with it
    near = did_you_mean(name, path_by_name)
    hint = near if near.startswith("; did") else "; `compress recipes` lists the shipped ones"
    raise RecipeError(f"recipe {name!r} is neither a file nor a shipped recipe{hint}")
