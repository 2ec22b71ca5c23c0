"""Make language models smaller and faster: quantize, prune and distil by chaining small passes.

The classes of all passes (`compress.GPTQ`, `compress.Wanda`, ...) are public names, too; they are found by their files.
Public names are imported when they are first used: torch takes seconds, which `compress --help` should not.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from compress.errors import CompressError as CompressError
from compress.version import __version__ as __version__

if TYPE_CHECKING:
    from compress.model.load import load as load
    from compress.passes import PASSES as PASSES
    from compress.plan import plan as plan
    from compress.recipe import Calibration as Calibration
    from compress.recipe import Evaluate as Evaluate
    from compress.recipe import Recipe as Recipe
    from compress.recipe import Save as Save
    from compress.runner import Result as Result
    from compress.runner import apply as apply
    from compress.runner import run as run

    def __getattr__(name: str) -> Any:
        """The classes of the passes."""


_HOMES = {
    "PASSES": "passes",
    "Calibration": "recipe",
    "Evaluate": "recipe",
    "Recipe": "recipe",
    "Result": "runner",
    "Save": "recipe",
    "apply": "runner",
    "load": "model.load",
    "plan": "plan",
    "run": "runner",
}
"""Where each public name is defined; the classes of the passes are not listed."""


class _Package(ModuleType):
    """This package with its public names imported on first use."""

    def __getattr__(self, name: str) -> Any:
        if name in _HOMES:
            found = getattr(import_module(f"compress.{_HOMES[name]}"), name)
        elif name == "__all__":
            found = sorted([*_HOMES, "CompressError", "__version__", *(step.__name__ for step in self.PASSES.values())])
        else:
            steps = self.PASSES.values() if name[:1].isupper() else ()
            found = next((step for step in steps if step.__name__ == name), None)
            if found is None:
                raise AttributeError(f"module 'compress' has no attribute {name!r}")
        setattr(self, name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """`compress.plan` is the function: importing the module of that name does not hide it."""
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


sys.modules[__name__].__class__ = _Package
