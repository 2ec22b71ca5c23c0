"""Make language models smaller and faster: quantize, prune and distil by chaining small passes.

The classes of all passes (`compress.GPTQ`, `compress.Wanda`, ...) are public names too. Public names are imported on
first use: torch takes seconds to import, and `compress --help` does not need it. After `import compress`, transformers
loads checkpoints of format `native`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compress.errors import CompressError as CompressError
from compress.version import __version__ as __version__

if TYPE_CHECKING:
    from compress.checkpoint.load import load as load
    from compress.passes import PASSES as PASSES
    from compress.pipeline.apply import apply as apply
    from compress.pipeline.compare import compare as compare
    from compress.pipeline.evaluation import evaluate as evaluate
    from compress.pipeline.export import save as save
    from compress.pipeline.exporting import export as export
    from compress.pipeline.finish import Result as Result
    from compress.pipeline.imatrix import imatrix as imatrix
    from compress.pipeline.model_free import quantize_folder as quantize_folder
    from compress.pipeline.oneline import distill as distill
    from compress.pipeline.oneline import prune as prune
    from compress.pipeline.oneline import quantize as quantize
    from compress.pipeline.plan import plan as plan
    from compress.pipeline.publish import push_to_hub as push_to_hub
    from compress.pipeline.run import run as run
    from compress.pipeline.sensitivity import sensitivity as sensitivity
    from compress.pipeline.sweep import sweep as sweep
    from compress.pipeline.upload import upload as upload
    from compress.recipe.schema import Calibration as Calibration
    from compress.recipe.schema import Evaluate as Evaluate
    from compress.recipe.schema import Recipe as Recipe
    from compress.recipe.schema import Save as Save

_HOMES = {
    "PASSES": "passes",
    "Calibration": "recipe.schema",
    "Evaluate": "recipe.schema",
    "Recipe": "recipe.schema",
    "Result": "pipeline.finish",
    "Save": "recipe.schema",
    "apply": "pipeline.apply",
    "compare": "pipeline.compare",
    "distill": "pipeline.oneline",
    "evaluate": "pipeline.evaluation",
    "export": "pipeline.exporting",
    "load": "checkpoint.load",
    "plan": "pipeline.plan",
    "prune": "pipeline.oneline",
    "push_to_hub": "pipeline.publish",
    "quantize": "pipeline.oneline",
    "quantize_folder": "pipeline.model_free",
    "run": "pipeline.run",
    "save": "pipeline.export",
    "imatrix": "pipeline.imatrix",
    "sensitivity": "pipeline.sensitivity",
    "sweep": "pipeline.sweep",
    "upload": "pipeline.upload",
}
"""The module that defines each public name; the classes of the passes are not listed."""

import_module("compress.checkpoint.registration").register()


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _HOMES:
        value = getattr(import_module(f"compress.{_HOMES[name]}"), name)
    elif name == "__all__":
        classes = (step.__name__ for step in __getattr__("PASSES").values())
        value = sorted([*_HOMES, "CompressError", "__version__", *classes])
    else:
        passes = __getattr__("PASSES") if name[:1].isupper() else {}
        key = next((key for key in passes if key.replace("_", "") == name.lower()), None)
        if key is None or passes[key].__name__ != name:
            raise AttributeError(f"module 'compress' has no attribute {name!r}")
        value = passes[key]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
