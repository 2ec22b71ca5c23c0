"""What a shell offers after TAB: names of passes, schemes, suites and devices, and recipe files.

It is computed while the user waits, so nothing slow is imported: passes are the files of their folder.
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
    """The files of a folder of the package by their names without the suffix."""
    package, _, rest = folder.partition("/")
    found = files("compress").joinpath(package, *filter(None, [rest])).iterdir()
    return sorted(file.name.removesuffix(suffix) for file in found if file.name.endswith(suffix))


def starting_with(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    """The names that begin as the user has typed; upper and lower case are equal."""
    return [CompletionItem(name) for name in names if name.lower().startswith(incomplete.lower())]


def complete_pass(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Names of passes."""
    from compress.passes import PASSES

    return starting_with(incomplete, PASSES)


def complete_shipped(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Names of shipped recipes."""
    from compress.recipe.shipped import shipped

    return starting_with(incomplete, shipped())


def complete_scheme(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Names of schemes."""
    return starting_with(incomplete, _names_of("recipe/presets", ".yaml"))


def complete_suite(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Names of suites, and YAML files."""
    return starting_with(incomplete, _names_of("recipe/suites", ".yaml")) + _yaml_files(incomplete)


def complete_compute(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Devices of computation."""
    return starting_with(incomplete, COMPUTE)


def complete_device(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Devices of `compress roofline`."""
    from compress.roofline.devices import devices

    return starting_with(incomplete, ["here", *devices()])


def complete_recipe(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Shipped recipes, and YAML files here and in the folders here; any files where there are none."""
    from compress.recipe.shipped import shipped

    offered = starting_with(incomplete, shipped()) + _yaml_files(incomplete)
    return offered or [CompletionItem(incomplete, type="file")]


def _yaml_files(incomplete: str) -> list[CompletionItem]:
    patterns = (f"{escape(incomplete)}*.yaml", f"{escape(incomplete)}*/*.yaml")
    return [CompletionItem(path) for pattern in patterns for path in sorted(glob(pattern))]


def complete_target(context: Any, parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Words of targets; after a comma the next one."""
    from compress.recipe.targets import words

    before, comma, last = incomplete.rpartition(",")
    known = starting_with(last.strip(), (value for values in words().values() for value in values))
    return [CompletionItem(f"{before}{comma}{' ' if comma else ''}{one.value}") for one in known]
