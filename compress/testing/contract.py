"""check_pass: the whole contract on one pass, on a small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor
from transformers import PreTrainedModel

from compress.passes.contract.passes import Pass
from compress.recipe.plugins import load_file
from compress.testing import checks
from compress.testing.model import tiny_ids, tiny_model
from compress.testing.trial import PassTrial, require


def check_pass(
    step: type[Pass] | Pass | str | Path,
    before: Sequence[Pass] = (),
    after: Sequence[Pass] = (),
    model: Callable[[], PreTrainedModel] = tiny_model,
    ids: Tensor | None = None,
) -> None:
    """Check that a pass keeps the contract of all passes; nothing is downloaded.

    It is a described, frozen value that survives YAML; its facts are true of what it makes; it is deterministic and
    leaves the global random state, layers that are not targeted, and pruned weights alone; `run` ships what `apply`
    makes.

    step: a pass, its class (which is tried with its defaults), or the file of a plugin. before, after: passes that it
    needs around it. model: makes the model to try it on, the same at every call, with at least three blocks; by default
    a small one with random weights. ids: calibration ids for the model.

    Raises AssertionError, which says what does not hold; RecipeError for a file without a pass, or a class of a script.
    """
    plugins: tuple[str, ...] = ()
    if isinstance(step, (str, Path)):
        plugins = (str(step),)
        step = load_file(Path(step)).step
    kind = step if isinstance(step, type) else type(step)
    require(issubclass(kind, Pass), f"{kind.__name__} is not a pass; derive from LayerPass, BlockPass or ModelPass")
    checks.check_described(kind)
    given = kind() if isinstance(step, type) else step
    checks.check_value(given)
    checks.check_options(given)
    trial = PassTrial(given, model, tiny_ids() if ids is None else ids, tuple(before), tuple(after), plugins)
    for check in (
        checks.check_apply,
        checks.check_facts,
        checks.check_patterns,
        checks.check_targets,
        checks.check_pruned,
    ):
        check(trial)
    with TemporaryDirectory() as folder:
        checks.check_run(trial, Path(folder))
