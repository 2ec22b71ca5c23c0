"""A recipe to start from, fitted to a model: what `compress init` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from compress.checkpoint.containers.files import check_output_file, write_text
from compress.errors import CalibrationError, OutputError, TargetError, UserError
from compress.passes.contract.problems import mistakes_in
from compress.pipeline.plan import Plan, plan
from compress.pipeline.readers import UNVERIFIED
from compress.recipe.paths import stored
from compress.recipe.schema import Recipe
from compress.recipe.shipped import SUFFIXES
from compress.recipe.targets import EMBEDDED, LENGTH, Start, choose, group_sizes, read_target, recipe_text

SMALLER_GROUPS, SHORTER = (64, 32, 16), (256, 128, 64)
"""Group sizes and lengths that are tried for models whose widths and contexts need them."""


@dataclass(frozen=True)
class Started:
    """A written recipe. changed: options that differ from the start, and why. planned: None if it was not planned."""

    path: Path
    start: Start
    text: str
    changed: tuple[str, ...] = ()
    planned: Plan | None = None


def start_recipe(
    model: str, target: str, path: Path, overwrite: bool = False, check: bool = True, source: str = EMBEDDED
) -> Started:
    """Write the recipe of a target for a model, after a plan of it has succeeded.

    A group size that the model's widths do not allow, and sequences longer than its context, are made smaller.
    check: False: write it without a look at the model. source: of the calibration and of the evaluation.

    Raises RecipeError for a target, OutputError for a file that is there or unwritable, and the errors of `plan`.
    """
    check_output_file(path, SUFFIXES)
    if path.exists() and not overwrite:
        raise OutputError(f"{path}: is there already; write another name, or overwrite it")
    start = choose(read_target(target))
    data = {"model": model, "calibration": {"source": source}}
    data = stored(data, path.parent)
    spell = partial(_spelled, start, data["model"], target, path, data["calibration"]["source"])
    started = _fitted(start, path, spell) if check else Started(path, start, spell())
    write_text(path, started.text)
    return started


def _spelled(
    start: Start,
    model: str,
    target: str,
    path: Path,
    source: str,
    group: int | None = None,
    length: int = LENGTH,
    measure: str = "perplexity",
) -> str:
    return recipe_text(start, model, target, path.as_posix(), group, length, measure, source)


def _fitted(start: Start, path: Path, spell: Callable[..., str], measure: str = "perplexity") -> Started:
    """Return the first variant that can be planned, one that transformers can load if there is any.

    A model without a language-model head gets agreement in place of perplexity.

    Raises:
        UserError: of the last variant, if none can be planned.
    """
    first_reason: UserError | str | None = None
    last_error, unverified = None, None
    for group, length, changed in _variants(start):
        if unverified is not None and length != LENGTH:
            continue  # a shorter text does not change what transformers can load
        text = spell(group, length, measure)
        try:
            planned = plan(Recipe.from_text(text, str(path), folder=path.parent))
        except UserError as error:
            errors = mistakes_in(error)
            if measure != "agreement" and any(getattr(e, "path", ()) == ("eval", "perplexity") for e in errors):
                return _fitted(start, path, spell, "agreement")
            if not all(isinstance(e, TargetError | CalibrationError) for e in errors):
                raise
            first_reason, last_error = first_reason or error, error
            continue
        reason = "" if first_reason is None else f"; otherwise: {first_reason}"
        started = Started(path, start, text, tuple(f"{option}{reason}" for option in changed), planned)
        note = next((note for note in planned.notes if note.startswith(UNVERIFIED)), None)
        if note is None:
            return started
        first_reason, unverified = first_reason or note, unverified or started
    if unverified is not None:
        return unverified
    assert last_error is not None
    raise last_error


def _variants(start: Start) -> Iterator[tuple[int | None, int, tuple[str, ...]]]:
    """(group size or None, length, what was changed), the unchanged start first."""
    most = max(group_sizes(start), default=0)
    groups = [None, *(size for size in SMALLER_GROUPS if size < most)]
    for group, length in product(groups, (LENGTH, *SHORTER)):
        sizes = () if group is None else (f"group_size is {group}",)
        yield group, length, (*sizes, *(() if length == LENGTH else (f"length is {length}",)))
