"""Shell completion: names of passes, schemes, suites and devices, and recipe files.

Completions are computed while the user waits, so nothing slow is imported: the names of passes are the files of their
folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from glob import escape, glob
from importlib.resources import files
from typing import Any

from click.shell_completion import CompletionItem

COMPUTE = "auto", "cpu", "cuda"
"""Devices of computation; cuda:1 and so on can be typed."""


def _names_of(folder: str, suffix: str) -> list[str]:
    """Return the sorted names of the files in a folder of the package, without the suffix."""
    package, _, subfolder = folder.partition("/")
    entries = files("compress").joinpath(package, *filter(None, [subfolder])).iterdir()
    return sorted(file.name.removesuffix(suffix) for file in entries if file.name.endswith(suffix))


def starting_with(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    """Return the names that start with the typed text, ignoring case."""
    return [CompletionItem(name) for name in names if name.lower().startswith(incomplete.lower())]


def complete_pass(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a pass."""
    from compress.passes import PASSES

    return starting_with(incomplete, PASSES)


def complete_pruning(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a pass that prunes."""
    from compress.passes import PASSES

    return starting_with(incomplete, PASSES.of_kind("prune"))


def complete_shipped(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a shipped recipe."""
    from compress.recipe.shipped import shipped

    return starting_with(incomplete, shipped())


def complete_scheme(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a scheme."""
    return starting_with(incomplete, _names_of("recipe/presets", ".yaml"))


def complete_format(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a checkpoint format."""
    from compress.checkpoint.formats import CLASSES

    return starting_with(incomplete, CLASSES)


def complete_export_format(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a format that `compress export` writes."""
    from compress.checkpoint.formats import CLASSES, RUNTIMES

    return starting_with(incomplete, [*CLASSES, *RUNTIMES])


def complete_suite(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a suite, or the path of a YAML file."""
    return starting_with(incomplete, _names_of("recipe/suites", ".yaml")) + _yaml_files(incomplete)


def complete_compute(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a compute device."""
    return starting_with(incomplete, COMPUTE)


def complete_device(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete a device of `compress roofline`."""
    from compress.roofline.devices import devices

    return starting_with(incomplete, ["here", *devices()])


def complete_recipe(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete a shipped recipe or a YAML file here or one folder below; any file if there are none."""
    from compress.recipe.shipped import shipped

    offered = starting_with(incomplete, shipped()) + _yaml_files(incomplete)
    return offered or [CompletionItem(incomplete, type="file")]


def _yaml_files(incomplete: str) -> list[CompletionItem]:
    patterns = (f"{escape(incomplete)}*.yaml", f"{escape(incomplete)}*/*.yaml")
    return [CompletionItem(path) for pattern in patterns for path in sorted(glob(pattern))]


def complete_target(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Complete a word of a target; after a comma, the next word."""
    from compress.recipe.targets import words

    previous, comma, incomplete_phrase = incomplete.rpartition(",")
    items = starting_with(incomplete_phrase.strip(), (value for values in words().values() for value in values))
    return [CompletionItem(f"{previous}{comma}{' ' if comma else ''}{item.value}") for item in items]
