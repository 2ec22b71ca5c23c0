"""The code that a run depends on, its identity, and the recipe that it writes into its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import pydantic

from compress.checkpoint.containers.files import file_sha256
from compress.checkpoint.sources.files import fingerprint_of
from compress.checkpoint.sources.weight_files import weight_files
from compress.errors import RecipeError, UserError
from compress.passes.contract.passes import Pass
from compress.passes.contract.wording import Place, place_text
from compress.recipe.paths import paths_of_passes, stored
from compress.recipe.plugins import load_file, module_text, spelled
from compress.recipe.schema import Recipe
from compress.recipe.yaml import yaml_of
from compress.version import __version__

PACKAGE = "compress"
WITHOUT_EFFECT = ("__main__.py", "cli", "evaluation", "report", "testing")
"""Files and folders of the package that have no effect on the bytes of a checkpoint."""
SHOWN = 3  # differences in a message
WIDEST = 80  # characters of a value in it
UNKNOWN = "unknown"
"""The digest of a pass without source."""
RECIPE_FILE = "recipe.yaml"
PLUGINS = "plugins"
"""The folder next to recipe.yaml with copies of the recipe's plugins."""


def fingerprint(**parts: Any) -> str:
    """A digest of named values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def inputs_of(recipe: Recipe, model: str, calibration: str) -> dict[str, Any]:
    """Return what the bytes of a checkpoint depend on besides code.

    The evaluation, the verification and the formats to which the checkpoint is converted are left out.

    model, calibration: digests of the model's files and of the calibration ids.
    """
    options = recipe.model_dump(mode="json", exclude={"eval": True, "model": True, "plugins": True, "save": {"verify"}})
    options["save"]["format"] = recipe.save.formats[0]
    files = {name: _digest_of_path(Path(name)) for name in paths_of_passes(recipe.model_dump(mode="json"))}
    return {"recipe": options, "model": model, "calibration": calibration, "version": __version__, "files": files}


def _digest_of_path(path: Path) -> str:
    """Return the sha256 of a file, and for the folder of a model, such as a teacher, the digest of a base model."""
    if path.is_file():
        return file_sha256(path)
    return fingerprint_of(path, weight_files(path)) if (path / "config.json").exists() else UNKNOWN


def identity(inputs: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """Return the fingerprint of a run. inputs, code: as returned by `inputs_of` and `code_of`."""
    return fingerprint(**inputs, code=code)


def changed_inputs(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return what differs between the inputs of two runs, in words; None if that is not known."""
    if not old or set(old) != set(new):
        return None
    texts = {"model": "the model is another one", "calibration": "the calibration text is another one"}
    texts |= {"files": "a file that a pass reads is another one"}
    differences = _differences(old["recipe"], new["recipe"], ())
    differences += [text for key, text in texts.items() if old[key] != new[key]]
    differences += [] if old["version"] == new["version"] else [f"it was made by compress {old['version']}"]
    more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return f"{'; '.join(differences[:SHOWN])}{more}" if differences else None


def _differences(old: Any, new: Any, place: Place) -> list[str]:
    """List the places at which plain values differ, with the values."""
    if isinstance(old, dict) and isinstance(new, dict) and set(old) == set(new):
        return [line for key in old for line in _differences(old[key], new[key], (*place, key))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [line for i, pair in enumerate(zip(old, new, strict=True)) for line in _differences(*pair, (*place, i))]
    values = (shorten(json.dumps(value), WIDEST, placeholder=" ...") for value in (old, new))
    return [] if old == new else ["{}: {} there, {} here".format(place_text(place), *values)]


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


def written(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Return the files that state a recipe in a folder, by name: recipe.yaml, and copies of the plugins that it names.

    Paths are relative to the folder, or absolute where they are far from it.

    Raises RecipeError if recipe.yaml could not be read again as the same recipe.
    """
    copies = {f"{PLUGINS}/{Path(path).name}": load_file(Path(path)).text for path in recipe.plugins}
    try:
        again = Recipe.from_text(recipe.to_yaml())
    except UserError as error:
        raise RecipeError(f"the recipe.yaml of this run could not be read again: {error}") from error
    for label, step, copied in zip(recipe.labels(), recipe.passes, again.passes, strict=True):
        if type(step) is not type(copied):
            raise RecipeError(f"{label}: the file of the pass changed after the recipe was read; read the recipe again")
        if step != copied:
            raise RecipeError(
                f"{label}: its options are not the same after a round trip through YAML; "
                "use options of plain types, or validators that accept their plain form"
            )
    data = stored(recipe.model_dump(mode="json"), folder) | {"plugins": list(copies)}
    return {**copies, RECIPE_FILE: yaml_of(data)}


def published(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the plain values of a recipe for everybody: without folders of this machine."""
    plugins = [f"{PLUGINS}/{Path(path).name}" for path in recipe.plugins]
    return stored(recipe.model_dump(mode="json"), folder, public=True) | {"plugins": plugins}
