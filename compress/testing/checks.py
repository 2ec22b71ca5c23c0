"""The checks of the contract of passes, which raise AssertionError; the package tests all its passes with them."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import yaml
from jaxtyping import Float
from pydantic import ValidationError
from torch import Tensor

from compress.checkpoint.load import load
from compress.errors import CompressError, TargetError, UserError
from compress.layers.linear import CompressedLinear, linears
from compress.passes.contract.facts import ANY_LAYER, Fact
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.passes import BlockPass, LayerPass, ModelPass, Pass, chosen_linears
from compress.passes.families.quantizing import Quantizing
from compress.pipeline.apply import apply
from compress.pipeline.run import run
from compress.recipe.order import check_order
from compress.recipe.schema import Calibration, Evaluate, Recipe, Save
from compress.testing.trial import PassTrial, changed, differing, require, tensors_of

SIZES = (LayerPass, BlockPass, ModelPass)
SEED = 20


class Masking(LayerPass):
    """Prune half of the weights, in no pattern that an algorithm would choose."""

    paper: ClassVar[str] = "https://example.org/masking"
    makes: ClassVar[frozenset[Fact]] = frozenset({"masked"})

    def solve(self, weight: Float[Tensor, "out in"], statistics: object, layer: Layer) -> Solution:
        draw = torch.Generator().manual_seed(weight.shape[0])
        keep = (torch.rand(weight.shape, generator=draw) > 0.5).to(weight.device)
        return Solution(weight * keep, keep)


def check_described(kind: type[Pass]) -> None:
    """Check that the class has a docstring and a publication, and that it describes every option."""
    require(kind.__doc__, "the class needs its own docstring")
    is_address = not kind.paper or kind.paper.startswith("https://")
    require(is_address, "paper: write the https address of the publication or of the source, or leave it out")
    missing = [name for name, option in kind.model_fields.items() if not option.description]
    require(not missing, f"options without a description: {', '.join(missing)}; add Field(description=...)")


def check_value(step: Pass) -> None:
    """Check that a pass is a frozen value of exactly one size, with a verb."""
    require(sum(isinstance(step, size) for size in SIZES) == 1, "derive from one of LayerPass, BlockPass, ModelPass")
    require(not inspect.isabstract(type(step)), "its verb is missing")
    for name in type(step).model_fields:
        try:
            setattr(step, name, getattr(step, name))
        except ValidationError:
            continue
        raise AssertionError(f"option {name} can be assigned; keep the frozen configuration of Pass")
    require(hash(step) == hash(changed(step)) and step == changed(step), "equal options must give equal passes")


def check_options(step: Pass) -> None:
    """Check that unknown options and wrong patterns are errors, and that options survive a round trip through YAML."""
    for options, mistake in (({"tragets": "*"}, "an unknown option"), ({"targets": ["re:("]}, "a wrong pattern")):
        try:
            changed(step, **options)
        except ValidationError:
            continue
        raise AssertionError(f"{mistake} is no error; keep extra='forbid' and the validators of Pass")
    again = type(step).model_validate(yaml.safe_load(yaml.safe_dump(step.model_dump(mode="json"))))
    require(again == step, "its options are not the same after a round trip through YAML")


def check_facts(trial: PassTrial) -> None:
    """Check that the declared facts, and no others, hold for the layers of the pass after it."""
    step = trial.step
    require(type(step).makes <= step.effects(ANY_LAYER).facts, "effects must contain the facts of makes")
    require(not step.after & step.never_after, "a fact is in after and in never_after")
    if step.requires.new_shape:
        return
    model = apply(trial.fresh(), trial.chain, trial.ids)
    neighbours = (*trial.preceding, *trial.following)
    neighbour_facts = {fact for neighbour in neighbours for fact in neighbour.effects(ANY_LAYER).facts}
    names = list(linears(model))
    inside = [name for name in names if name.startswith(tuple(f"{block}." for block in trial.blocks))]
    for name in chosen_linears(step, inside, trial.label):
        layer, layer_step = CompressedLinear.of(model.get_submodule(name)), step.for_layer(name) or step
        true: dict[Fact, bool] = {"masked": layer.mask is not None, "quantized": layer.quantized}
        for fact, holds in true.items():
            if fact in layer_step.effects(ANY_LAYER).facts:
                require(holds, f"it declares {fact}, but {name} is not afterwards")
            elif fact not in neighbour_facts:
                require(not holds, f"{name} is {fact} afterwards; add the fact to makes")


def check_apply(trial: PassTrial) -> None:
    """Check that the pass changes something, deterministically and to finite values, and leaves its inputs alone."""
    applied = trial.applied
    is_unchanged = applied.keys() == trial.original.keys() and not differing(applied, trial.original)
    require(not is_unchanged, "it changes nothing")
    broken = [n for n, t in applied.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    require(not broken, f"NaN or infinity in {broken[:1]}")
    model, ids, option_hashes = trial.fresh(), trial.ids.clone(), [hash(step) for step in trial.chain]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        state = torch.get_rng_state()
        require(apply(model, trial.chain, ids) is model, "apply returns another model")
        drawn = not torch.equal(torch.get_rng_state(), state)
    require(not drawn, "it draws from the global random state; use a torch.Generator with its own seed")
    again = differing(tensors_of(model), applied)
    require(not again, f"a second time it gives other values, first in {again[:1]}")
    require(torch.equal(ids, trial.ids), "it changes the calibration ids")
    require([hash(step) for step in trial.chain] == option_hashes, "it changes its own options")


def check_run(trial: PassTrial, folder: Path) -> None:
    """Check that `run` stores what `apply` computes and leaves the files of the model alone.

    Args:
        trial: the pass and its model.
        folder: empty folder for the model and the checkpoint.
    """
    trial.fresh().save_pretrained(folder / "model")
    np.save(folder / "ids.npy", trial.ids.numpy())
    files = _digests(folder / "model")
    calibration = Calibration(source=str(folder / "ids.npy"), sequences=None, length=None)
    recipe = Recipe(
        model=str(folder / "model"),
        calibration=calibration,
        plugins=trial.plugins,
        passes=tuple(trial.chain),
        save=Save(format="native", verify="own"),
        eval=Evaluate(perplexity=()),
    )
    shipped, _ = load(run(recipe, folder / "out").folder)
    changed_names = differing(tensors_of(shipped), trial.applied)
    require(not changed_names, f"the checkpoint holds other values than apply computes, first in {changed_names[:1]}")
    require(_digests(folder / "model") == files, "the files of the model changed")


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def check_targets(trial: PassTrial) -> None:
    """Check that the pass changes its targets and nothing else."""
    step, (part, more) = trial.step, trial.part()
    inside = part.removesuffix("*")
    if step.requires.new_shape:
        return _check_other_tensors_stay(trial, part)
    untouched = trial.tensors()
    moved = differing(trial.tensors(changed(step, targets=[part])), untouched)
    one_sweep = isinstance(step, BlockPass) or step.requires.unquantized
    neighbours = (*trial.preceding, *trial.following)
    if one_sweep and any(neighbour.requires.data for neighbour in neighbours):  # calibrated on what the pass changes
        later = tuple(f"{block}." for block in trial.blocks[2:])
        moved = [name for name in moved if not name.startswith(later)]
    require(moved, f"targets: {part} changes nothing")
    outside = [name for name in moved if not name.startswith(inside)]
    require(not outside, f"with targets: {part} it changes {outside[:1]}")
    ignoring = trial.tensors(changed(step, targets=more, ignore=[part]))
    touched = [n for n in ignoring if n.startswith(inside) and not torch.equal(ignoring[n], untouched[n])]
    require(not touched, f"with ignore: {part} it changes {touched[:1]}")


def _check_other_tensors_stay(trial: PassTrial, part: str) -> None:
    """Check that a change of shape keeps untargeted tensors, under any name, or that an error refuses the targets."""
    try:
        tensors = trial.tensors(changed(trial.step, targets=[part]))
    except TargetError as error:
        return require("uniform" in str(error), f"the error for a part of the model does not say why: {error}")
    require(tensors.keys() != trial.original.keys(), "the model keeps its shape")
    for name, tensor in trial.original.items():
        is_target = name.startswith(part.removesuffix("*"))
        is_kept = is_target or any(torch.equal(tensor, new) for new in tensors.values())
        require(is_kept, f"{name} is lost although it is not targeted")


def check_pruned(trial: PassTrial) -> None:
    """Check that pruned weights stay exactly zero, with zero points too, unless the pass must not follow pruning."""
    part, _ = trial.part()
    has_zero_points = isinstance(trial.step, Quantizing) and trial.step.weights.startswith("int")
    steps = [trial.step]
    if has_zero_points and not trial.following:
        steps.append(changed(trial.step, symmetric=False))
    for step in steps:
        chain = [Masking(), *trial.with_step(changed(step, targets=[part]))]
        if any("masked" in s.never_after for s in chain):
            return _check_refused(chain)
        pruned = linears(apply(trial.fresh(), chain[:1], trial.ids))
        masks = {n: m.mask for n, m in pruned.items() if isinstance(m, CompressedLinear) and m.mask is not None}
        model = apply(trial.fresh(), chain, trial.ids)
        for name, mask in masks.items():
            layer = CompressedLinear.of(model.get_submodule(name))
            is_kept = layer.mask is not None and int(layer.mask.count_nonzero()) <= int(mask.count_nonzero())
            require(is_kept, f"{name}: the mask of an earlier pass is lost; keep layer.mask")
            zero = layer.mask is not None and layer.is_zero_outside(layer.mask)
            require(zero, f"{name}: pruned weights are not exactly zero")


def _check_refused(chain: list[Pass]) -> None:
    try:
        check_order(chain)
    except UserError as error:
        return require("are already pruned" in str(error), f"another error: {error}")
    raise AssertionError("it may not come after pruning, but no error says so")


def check_patterns(trial: PassTrial) -> None:
    """Check that patterns that match nothing are errors before any work."""
    for option in ("targets", "ignore"):
        try:
            apply(trial.fresh(), trial.with_step(changed(trial.step, **{option: ["*.q_porj"]})), trial.ids)
        except CompressError as error:
            said = f"{trial.label}: {option} pattern '*.q_porj' matches no linear"
            require(said in str(error), f"the error for a pattern that matches nothing is another one: {error}")
            continue
        raise AssertionError(f"{option} with a pattern that matches nothing is no error; keep `choose`")
