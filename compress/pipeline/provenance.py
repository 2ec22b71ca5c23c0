"""The code that a run depends on, its identity, and the recipe that it writes into its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pydantic

from compress.errors import RecipeError
from compress.passes.contract.passes import Pass
from compress.recipe.plugins import load_file, module_text, spelled
from compress.recipe.schema import Recipe
from compress.version import __version__

PACKAGE = "compress"
WITHOUT_EFFECT = ("__main__.py", "cli", "evaluate", "report", "testing")
"""Files and folders of the package that have no effect on the bytes of a checkpoint."""
UNKNOWN = "unknown"
"""The digest of a pass without source."""
RECIPE_FILE = "recipe.yaml"
PLUGINS = "plugins"
"""The folder next to recipe.yaml with copies of the recipe's plugins."""


def fingerprint(**parts: Any) -> str:
    """A digest of named values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def identity(recipe: Recipe, model: str, calibration: str) -> tuple[str, dict[str, str]]:
    """Return the fingerprint of a run, and the digests of its code (`code_of`).

    The fingerprint covers all that the bytes of the checkpoint depend on: not the evaluation, nor how it is verified.
    model, calibration: digests of the model's files and of the calibration ids.
    """
    options = recipe.model_dump(mode="json", exclude={"eval": True, "model": True, "plugins": True, "save": {"verify"}})
    code = code_of(recipe)
    return fingerprint(recipe=options, model=model, calibration=calibration, version=__version__, code=code), code


def code_of(recipe: Recipe) -> dict[str, str]:
    """Return the sha256 of the source of every pass of a recipe, by its key, and that of this package.

    The source of a pass is the file that defines its class, with the files of its base classes outside of this package.
    """
    digests = {spelled(kind): source_sha256(kind) for kind in map(type, recipe.passes)}
    return {**digests, PACKAGE: package_sha256()}


def source_sha256(kind: type[Pass]) -> str:
    """Return the sha256 of the source of a pass; UNKNOWN if the source of a class is not available."""
    excluded = PACKAGE, pydantic.__name__
    bases = [
        c for c in kind.__mro__ if issubclass(c, pydantic.BaseModel) and c.__module__.partition(".")[0] not in excluded
    ]
    texts = [module_text(name) for name in dict.fromkeys(c.__module__ for c in (kind, *bases))]
    digest = hashlib.sha256()
    for text in texts:
        if text is None:
            return UNKNOWN
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


@cache
def package_sha256(root: Path = Path(__file__).parents[1], ignored: tuple[str, ...] = WITHOUT_EFFECT) -> str:
    """Compute the sha256 of the Python files of this package, except ignored files and folders at its top."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] not in ignored:
            digest.update(inside.as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def changed_code(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """Return what changed between the code of two runs, in words; None if nothing is known to have changed."""
    keys = [key for key in new if key in old and old[key] != new[key]]
    passes = [key for key in keys if key != PACKAGE]
    if passes:
        return f"the code of {', '.join(passes)} changed"
    return f"the code of {PACKAGE} itself changed" if keys else None


def written(recipe: Recipe) -> dict[str, str]:
    """Return the files that state a recipe in a folder, by name: recipe.yaml, and copies of the plugins that it names.

    Raises RecipeError if recipe.yaml could not be read again as the same recipe.
    """
    copies = {f"{PLUGINS}/{Path(path).name}": load_file(Path(path)).text for path in recipe.plugins}
    try:
        again = Recipe.from_text(recipe.to_yaml())
    except RecipeError as error:
        raise RecipeError(f"the recipe.yaml of this run could not be read again: {error}", error.path) from error
    for label, step, copied in zip(recipe.labels(), recipe.passes, again.passes, strict=True):
        if type(step) is not type(copied):
            raise RecipeError(f"{label}: the file of the pass changed after the recipe was read; read the recipe again")
        if step != copied:
            raise RecipeError(
                f"{label}: its options are not the same after a round trip through YAML; "
                "use options of plain types, or validators that accept their plain form"
            )
    return {**copies, RECIPE_FILE: recipe.model_copy(update={"plugins": tuple(copies)}).to_yaml()}
