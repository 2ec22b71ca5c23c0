"""Make language models smaller and faster: quantize, prune and distil by chaining small passes.

The classes of all passes (`compress.GPTQ`, `compress.Wanda`, ...) are public names, too; they are found by their files.
"""

from typing import Any

from compress.errors import CompressError
from compress.model.load import load
from compress.passes import PASSES
from compress.plan import plan
from compress.recipe import Calibration, Evaluate, Recipe, Save
from compress.runner import Result, apply, run
from compress.version import __version__

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]  passes are found by their files
    "PASSES",
    "Calibration",
    "CompressError",
    "Evaluate",
    "Recipe",
    "Result",
    "Save",
    "__version__",
    "apply",
    "load",
    "plan",
    "run",
    *(step.__name__ for step in PASSES.values()),
]


def __getattr__(name: str) -> Any:
    """The class of a pass by its name."""
    for step in PASSES.values():
        if step.__name__ == name:
            return step
    raise AttributeError(f"module 'compress' has no attribute {name!r}")
