"""`check_pass`: check the whole contract of passes on one pass, with a small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor
from transformers import PreTrainedModel

from compress.passes.contract.passes import Pass
from compress.recipe.plugins import load_file
from compress.testing import checks
from compress.testing.model import tiny_ids, tiny_mixture, tiny_model
from compress.testing.trial import PassTrial, require


def check_pass(
    step: type[Pass] | Pass | str | Path,
    before: Sequence[Pass] = (),
    after: Sequence[Pass] = (),
    model: Callable[[], PreTrainedModel] | None = None,
    ids: Tensor | None = None,
) -> None:
    """Check that a pass keeps the contract of all passes; nothing is downloaded.

    The pass is a described, frozen value that survives YAML. Its facts are true of its result. It is deterministic, and
    leaves the global random state, untargeted layers and pruned weights alone. `run` stores what `apply` computes.

    Args:
        step: a pass, its class (tried with default options), or the file of a plugin.
        before: passes that must precede it.
        after: passes that must follow it.
        model: makes the same model at every call, with at least three blocks; default: a small one with random weights,
            with experts if the pass needs them.
        ids: calibration ids for the model, [sequences, length].

    Raises:
        AssertionError: if the pass breaks the contract; the message says how.
        RecipeError: if a file holds no pass, or the class is defined in a script.
    """
    plugins: tuple[str, ...] = ()
    if isinstance(step, (str, Path)):
        plugins = (str(step),)
        step = load_file(Path(step)).step
    kind = step if isinstance(step, type) else type(step)
    require(issubclass(kind, Pass), f"{kind.__name__} is not a pass; derive from LayerPass, BlockPass or ModelPass")
    checks.check_described(kind)
    instance = kind() if isinstance(step, type) else step
    checks.check_value(instance)
    checks.check_options(instance)
    model = model or (tiny_mixture if instance.requires.experts else tiny_model)
    trial = PassTrial(instance, model, tiny_ids() if ids is None else ids, tuple(before), tuple(after), plugins)
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
