"""Predict how long a run takes on this machine, from trials on one block that are kept for later plans."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
import transformers

from compress.checkpoint.containers.files import check_writable, write_text
from compress.checkpoint.sources.untrusted import read_json
from compress.data.ids import extent
from compress.data.text_source import as_source
from compress.errors import CompressError
from compress.evaluation.store import digest_of
from compress.models.computation import device_of
from compress.passes.contract.passes import ModelPass, Pass, calibrates
from compress.pipeline.resolve import ResolvedRecipe, layer_shapes
from compress.pipeline.texts import texts_of
from compress.pipeline.trial import STEPS, Trial, chosen_block, repeated, trial, unlike
from compress.version import __version__

WINDOW = 512  # tokens of the forward pass that is timed if the recipe evaluates no text
KEPT = "compress-timing"
"""The folder of kept trials, in the user's cache of models."""

ONCE = ("capture",)
"""The phases of a run whose time does not depend on the number of blocks."""


@dataclass(frozen=True)
class Timing:
    """The predicted seconds of a run on this machine, by phase.

    phases: the passes by label, and 'evaluate' for the texts of known length. unknown: what takes time and is not
    predicted, in words. Reading texts, writing and reloading the checkpoint are not part of it.
    """

    phases: dict[str, float]
    unknown: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The predicted seconds of all phases."""
        return sum(self.phases.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "unknown": list(self.unknown), "seconds": self.seconds}


def timing(resolved: ResolvedRecipe, measure: bool) -> Timing | None:
    """Predict the seconds of a run. measure: run the trials if no earlier plan has kept them; otherwise None.

    A prediction that cannot be made has no phases, and its reason among `unknown`.
    """
    path = kept_file(resolved)
    rates = known(path)
    if rates is None and not measure:
        return None
    reason = unlike(resolved)
    if reason is not None:
        return Timing({}, (f"the passes: {reason}",))
    if rates is None:
        check_writable(path.parent)
        try:
            rates = trial(resolved, window_of(resolved))
        except CompressError as error:
            return Timing({}, (f"the passes: {error}",))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(rates.to_json()))
    return predicted(resolved, rates)


def predicted(resolved: ResolvedRecipe, measured: Trial) -> Timing:
    """Return the seconds of a run from a trial of it."""
    recipe, opened, steps = resolved.recipe, resolved.opened, resolved.steps
    block, blocks = chosen_block(opened.blocks, steps), len(opened.blocks)
    weights = {name: prod(shape) for name, shape in layer_shapes(opened).items()}
    batches, options = batches_of(resolved), {label: (step, names) for label, step, names in steps}
    depth_ratio = measured.before.seconds(blocks) / measured.before.seconds(1)
    phases: dict[str, float] = {}
    for name, rate in measured.rates.items():
        step, names = options.get(name, (None, ()))
        mine = sum(weights[n] for n in names if n.startswith(f"{block.name}."))
        scale = sum(weights[n] for n in names) / mine if mine else float(blocks)
        scale = depth_ratio if isinstance(step, ModelPass) else 1.0 if name in ONCE else scale
        phases[name] = scale * rate.seconds(batches, count_of(step))
    unknown: list[str] = []
    windows = windows_of(resolved, unknown)
    if windows:
        phases["evaluate"] = windows * (measured.before.seconds(blocks) + measured.after.seconds(blocks))
    if recipe.eval is not None and recipe.eval.tasks:
        unknown.append("the tasks of lm-eval")
    return Timing(phases, tuple(unknown))


def count_of(step: Pass | None) -> int:
    """The number of equal steps of a pass; that of the trial if it takes none."""
    return STEPS if step is None else repeated(step) or STEPS


def batches_of(resolved: ResolvedRecipe) -> float:
    """Return the number of calibration batches of a run."""
    calibration = resolved.recipe.calibration
    sequences, _ = extent(calibration, "calibration", calibration.sequences, calibration.length)
    return ceil(sequences / calibration.batch) if calibrates(resolved.steps) else 1


def window_of(resolved: ResolvedRecipe) -> int:
    """Return the tokens of an evaluation window."""
    settings = resolved.recipe.eval
    texts = texts_of(settings, resolved.opened.model)
    return (extent(texts[0], "test", None, settings.length)[1] if texts and settings else 0) or WINDOW


def windows_of(resolved: ResolvedRecipe, unknown: list[str]) -> int:
    """Return the number of evaluation windows of all texts; a text of unknown length is added to `unknown`."""
    total, settings = 0, resolved.recipe.eval
    for text in texts_of(settings, resolved.opened.model):
        count = extent(text, "test", settings.windows, settings.length)[0] if settings else 0
        if not count:
            unknown.append(f"the evaluation on all windows of {as_source(text).label}")
        total += count
    return total


def known(path: Path) -> Trial | None:
    """A kept trial; None if there is none that can be read."""
    try:
        return Trial.from_json(read_json(path))
    except (ValueError, KeyError, TypeError):
        return None


def kept_file(resolved: ResolvedRecipe) -> Path:
    """Return the file of the trial of this machine, model shape and passes, in the user's cache of models."""
    from huggingface_hub.constants import HF_HOME

    recipe, steps = resolved.recipe, resolved.steps
    machine = platform.node(), platform.machine(), torch.get_num_threads(), str(device_of(recipe.device))
    versions = __version__, torch.__version__, transformers.__version__
    shapes = [recipe.dtype, recipe.save.target().name, sorted(layer_shapes(resolved.opened).items())]
    passes = [(label, step.model_dump(mode="json")) for label, step, _ in steps]
    for (_, step, _), (_, options) in zip(steps, passes, strict=True):
        if step.repeats is not None and repeated(step) is not None:
            options.pop(step.repeats)  # a trial takes few steps, whatever the recipe asks for
    calibration = recipe.calibration
    texts = calibration.batch, extent(calibration, "calibration", 1, calibration.length)[1], window_of(resolved)
    return Path(HF_HOME) / KEPT / f"{digest_of(machine, versions, shapes, passes, texts)}.json"
