"""One contract over every pass, found by its file: nothing here names an algorithm.

A pass is tried with the options of its own recipe, and after the passes that precede it there.
"""

import inspect
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from mixtures import pico_mixture
from transformers import AutoModelForCausalLM

import compress
from compress import PASSES, Recipe, passes
from compress.errors import CalibrationError, RecipeError, SeveralErrors, TargetError
from compress.layers.linear import CompressedLinear, linears, replace_linear
from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.layers import Solution
from compress.passes.contract.passes import BlockPass, LayerPass, ModelPass, Pass
from compress.passes.families.pruning import PruningPass
from compress.passes.families.quantizing import Quantizing
from compress.recipe.order import check_order
from compress.testing import checks
from compress.testing.trial import PassTrial, changed, differing, tensors_of

ROOT = Path(__file__).parents[1]
PICO = Path(__file__).parent / "pico" / "model"

every_pass = pytest.mark.parametrize("key", PASSES)


def all_passes(check):
    """One test for all passes, of what takes no time; it fails with a line for every pass that is not as it should be."""

    def test():
        found = []
        for key in PASSES:
            try:
                check(key)
            except (AssertionError, pytest.fail.Exception) as error:
                found.append(f"{key}: {error}")
        assert not found, "\n".join(found)

    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    return test


def recipe_of(key: str) -> tuple[tuple[Pass, ...], int]:
    """The passes of the recipe of the same name, and the place of the one that it is about."""
    steps = Recipe.from_yaml(ROOT / "recipes" / f"{key}.yaml").passes
    keys = [step.key() for step in steps]
    assert key in keys, f"recipes/{key}.yaml does not use {key}"
    return steps, keys.index(key)


@cache
def step_of(key: str) -> Pass:
    """The pass with the options that its own recipe gives it."""
    steps, place = recipe_of(key)
    return steps[place]


def fresh():
    return AutoModelForCausalLM.from_pretrained(PICO).eval()


def maker_of(steps):
    """What makes the model that a chain is tried on: a mixture of experts if a pass needs one."""
    return pico_mixture if any(step.requires.experts for step in steps) else fresh


def fresh_with_outliers():
    """The same function, but one channel that norms write is much larger, as in real models: passes may look for that."""
    model = fresh()
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        readers = {
            block.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            block.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
        }
        with torch.no_grad():
            for norm, linears_ in readers.items():
                norm.weight[3] *= 128
                for linear in linears_:
                    linear.weight[:, 3] /= 128
    return model


@pytest.fixture(scope="module")
def ids(pico_ids):
    return pico_ids


@pytest.fixture(scope="module")
def trial(ids):
    """trial(key) -> a pass of the package after the passes of its recipe, and before those that it prepares for."""
    made: dict[str, PassTrial] = {}

    def of(key):
        if key not in made:
            steps, place = recipe_of(key)
            after = steps[place + 1 :] if steps[place].effects(ANY_LAYER).prepares is not None else ()
            made[key] = PassTrial(steps[place], maker_of(steps), ids, steps[:place], after)
        return made[key]

    return of


# One name everywhere


def test_every_file_holds_a_pass():
    files = {path.stem for path in Path(passes.__file__).parent.glob("*/*.py") if path.parent.name in passes.KINDS}
    assert set(PASSES) == files - {"__init__"}, "the class of a file is called like the file, underscores left out"


def test_every_algorithm_has_a_recipe_and_a_test_of_its_name():
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "passes").glob("test_*.py")}
    assert set(PASSES) <= recipes
    assert set(PASSES) <= tests


@all_passes
def test_key_class_and_recipe_have_one_name(key):
    step = PASSES[key]
    assert step.key() == key
    assert step.__name__.lower() == key.replace("_", "")
    assert step_of(key).key() == key


@all_passes
def test_it_says_what_it_does_and_where_it_was_published(key):
    checks.check_described(PASSES[key])
    assert "paper" in PASSES[key].__dict__ and inspect.getdoc(inspect.getmodule(PASSES[key]))


# A frozen value


@all_passes
def test_it_is_a_frozen_value_of_exactly_one_size(key):
    checks.check_value(step_of(key))


@all_passes
def test_unknown_options_are_errors_with_a_hint(key):
    checks.check_options(step_of(key))
    with pytest.raises(RecipeError, match=rf"^r:3:\d+: passes\[0\] {key} tragets: .*did you mean 'targets'"):
        Recipe.from_text(f"model: m\npasses:\n  - {key}: {{tragets: '*'}}\n", "r")


@all_passes
def test_it_survives_a_round_trip_through_yaml(key):
    recipe = Recipe(model="m", passes=recipe_of(key)[0])
    assert Recipe.from_text(recipe.to_yaml()) == recipe


@all_passes
def test_its_facts_are_told_consistently(key):
    step = step_of(key)
    assert isinstance(step, Quantizing) <= ("quantized" in step.effects(ANY_LAYER).facts)
    assert isinstance(step, PruningPass) <= ("masked" in step.effects(ANY_LAYER).facts)


# It runs


@every_pass
def test_it_changes_something_and_the_same_again_and_leaves_all_else_alone(key, trial):
    """Finite weights; neither the global random state nor what was asked changes, and neither has a say in the result."""
    checks.check_apply(trial(key))


@pytest.mark.few(9, slow=18)
@every_pass
def test_its_facts_are_true_of_what_it_makes(key, trial):
    checks.check_facts(trial(key))


@pytest.mark.few(0, slow=12)
@every_pass
def test_run_ships_the_weights_that_apply_makes(key, trial, tmp_path):
    checks.check_run(trial(key), tmp_path)


@pytest.mark.few(0, slow=12)
@every_pass
def test_what_is_not_targeted_stays_as_it_is(key, trial):
    has_outliers = trial(key).fresh is fresh  # a channel of the dense model
    checks.check_targets(replace(trial(key), fresh=fresh_with_outliers) if has_outliers else trial(key))


@pytest.mark.few(11, slow=22)
@every_pass
def test_what_was_pruned_before_stays_pruned(key, trial):
    """Exactly zero in the weight that is multiplied by, with zero points, too; or the pass may not come after pruning."""
    checks.check_pruned(trial(key))


# It fails as it should


@every_pass
def test_patterns_that_match_nothing_are_errors(key, trial, recipe, tmp_path):
    checks.check_patterns(trial(key))
    lost = trial(key).with_step(changed(step_of(key), targets=["*.q_porj"]))
    with pytest.raises(TargetError, match=rf"{key}: targets pattern '\*\.q_porj' matches no linear.*'q_proj'"):
        compress.run(recipe(*lost, save={"format": "native"}), tmp_path)


@every_pass
def test_data_is_asked_for_where_it_is_needed(key, trial):
    chain = trial(key).chain
    if any(step.requires.data for step in chain):
        with pytest.raises(CalibrationError, match="need token ids"):
            compress.apply(trial(key).fresh(), chain)
    elif not any(isinstance(step, ModelPass) for step in chain):
        assert differing(tensors_of(compress.apply(trial(key).fresh(), chain)), trial(key).applied) == []


@all_passes
def test_the_order_that_it_declares_is_checked_before_any_work(key):
    """After a pass that makes what it must not find, it is refused."""
    step = step_of(key)
    for fact in step.never_after:
        maker = next(
            s for other in PASSES for s in recipe_of(other)[0] if fact in s.effects(ANY_LAYER).facts and not s.after
        )
        with pytest.raises(
            (RecipeError, SeveralErrors),
            match=f"put {key} before it|remove one of the two, or give them disjoint targets",
        ):
            check_order([maker, step])
    if step.after:
        with pytest.raises(RecipeError, match="first; put a pass that does so before it"):
            check_order([step])
    if step.effects(ANY_LAYER).prepares:
        with pytest.raises(RecipeError, match="only .*; add a (quantizing|pruning) pass after it, such as "):
            check_order([step])


# Passes of one's own, of all sizes, in one chain


class Doubled(ModelPass):
    """Twice the weights of what it works on."""

    paper: ClassVar[str] = "https://example.org/doubled"

    def apply(self, model, run):
        for name in linears(model):
            if name.endswith("down_proj"):
                layer = replace_linear(model, name)
                layer.put(2 * layer.weight)
        run.journal.add("note", self.key(), "doubled")


class Shifted(LayerPass):
    """Something is added to every weight."""

    paper: ClassVar[str] = "https://example.org/shifted"
    amount: float = 0.25

    def solve(self, weight, seen, layer):
        layer.log("note", "shifted", amount=self.amount)
        return Solution(weight + self.amount)


class Negated(BlockPass):
    """The sign of one projection of each block."""

    paper: ClassVar[str] = "https://example.org/negated"

    def solve_block(self, block, inputs, log):
        CompressedLinear.of(block.mlp.up_proj).weight.neg_()


ONLY = ("model.layers.0.mlp.down_proj", "model.layers.2.mlp.down_proj")
OWN = {
    "model": ([Doubled()], lambda w: 2 * w),
    "model, layer": ([Doubled(), Shifted(targets=ONLY)], lambda w: 2 * w + 0.25),
    "layer, model, layer": ([Shifted(targets=ONLY), Doubled(), Shifted(targets=ONLY)], lambda w: 2 * (w + 0.25) + 0.25),
}


@pytest.mark.parametrize("chain", OWN)
def test_passes_of_ones_own_run_through_apply_and_run(chain, recipe, ids, tmp_path):
    steps, wanted = OWN[chain]
    original = tensors_of(fresh())
    in_memory = tensors_of(compress.apply(fresh(), steps, ids))
    result = compress.run(recipe(*steps, save={"format": "dense"}), tmp_path / "out")
    shipped = tensors_of(compress.load(result.folder)[0])
    for found in (in_memory, shipped):
        for name in ONLY:
            assert torch.allclose(found[f"{name}.weight"], wanted(original[f"{name}.weight"]), atol=1e-6)
        assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], original["model.layers.1.mlp.up_proj.weight"])
    notes = [entry.message for entry in result.journal.entries if entry.kind == "note"]
    assert ("shifted" in notes) == ("layer" in chain)
    assert ("doubled" in notes) == ("model" in chain)


def test_a_pass_of_ones_own_is_called_by_its_class(ids):
    assert Recipe(model="m", passes=[Doubled(), checks.Masking()]).labels() == [
        "passes[0] doubled",
        "passes[1] masking",
    ]
    with pytest.raises(TargetError, match=r"passes\[0\] shifted: targets pattern 'x' matches no linear"):
        compress.apply(fresh(), [Shifted(targets="x")], ids)


def test_a_block_pass_of_ones_own(ids):
    before, after = tensors_of(fresh()), tensors_of(compress.apply(fresh(), [Negated()], ids))
    assert differing(before, after) == [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
    assert torch.equal(after["model.layers.2.mlp.up_proj.weight"], -before["model.layers.2.mlp.up_proj.weight"])


def test_a_pass_without_its_verb_cannot_be_made():
    class Silent(LayerPass):
        """Nothing."""

        paper: ClassVar[str] = "https://example.org/silent"

    with pytest.raises(TypeError, match="abstract"):
        Silent()
