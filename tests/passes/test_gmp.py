"""GMP: its schedule on a 4x4 matrix by hand, masks that only shrink, resume, and what it recovers."""

import pytest
import torch
from masks import most_of
from pruned_training import RATES, WEIGHT, check_masks, in_training, recovered, stepped, texts

import compress
from compress.errors import NumericError, RecipeError
from compress.numerics.sparse.masks import Pattern
from compress.passes.contract.journal import Journal
from compress.passes.prune.gmp import GMP

STEP = GMP(pattern="layer", sparsity=0.5, end=0.5, every=2)


def test_a_schedule_of_four_steps_by_hand():
    """s = 0 before, .5 - .5 (1/2)^3 = .4375 after two steps of eight, .5 after four: 9 and 8 of 16 stay."""
    linear, weight = in_training(STEP)
    assert linear.update(0, 8) == {"sparsity": (0, 16)} and torch.equal(weight, WEIGHT)
    record = [int(stepped(linear, weight, torch.zeros(4, 4), 0.1, t, 8)["sparsity"][0]) for t in range(1, 9)]
    assert record == [0, 7, 7, 8, 8, 8, 8, 8]
    assert torch.equal(weight, WEIGHT * (WEIGHT.abs() > 0.55))
    assert [linear.parametrization.ready(t, 8) for t in (0, 3, 4, 8)] == [False, False, True, True]


def test_what_is_removed_gets_no_gradient_and_does_not_come_back():
    linear, weight = in_training(STEP)
    linear.update(2, 8)
    gone = weight == 0
    assert int(gone.sum()) == 7
    stepped(linear, weight, torch.ones(4, 4), 10.0, 3, 8)
    assert bool((weight.grad[gone] == 0).all()) and bool((weight.grad[~gone] == 1).all())
    assert torch.equal(weight == 0, gone), "and what is left may be smaller than what is gone"


def test_two_of_four_come_group_by_group():
    """Lost magnitudes of the rows: .3, .7, .09, 1.9; three quarters of the way to 2:4, the first three are there."""
    linear, weight = in_training(GMP(pattern="2:4"))
    linear.parametrization.shrink(weight, Pattern("2:4"), 0.375)
    assert linear.parametrization.mask.sum(1).tolist() == [2, 2, 2, 4]


@pytest.mark.parametrize("pattern", ["2:4", "row", "4x1"])
def test_after_every_step_what_is_removed_is_zero_and_in_the_end_the_pattern_holds(pico_model, pico_ids, pattern):
    seen = []

    class Watching(GMP):
        def parametrize(self, name, layer):
            made = super().parametrize(name, layer)
            real = made.update

            def update(weight, done, of):
                record = real(weight, done, of)
                assert bool((weight[~made.mask] == 0).all())
                seen.append((done, int((~made.mask).sum())))
                return record

            made.update = update
            return made

    step = Watching(pattern=pattern, steps=4, batch=2, targets="*.mlp.up_proj", weight_rate=1.0)
    journal = Journal()
    compress.apply(pico_model, [step], pico_ids, journal=journal)
    for layer in (block.mlp.up_proj for block in pico_model.model.layers):
        assert int((~layer.mask).sum()) == step.pattern.removed(layer.shape, 0.5)
        assert bool((layer.weight[~layer.mask] == 0).all()) and int((layer.weight == 0).sum()) < 0.51 * 128 * 288
        assert pattern != "2:4" or most_of(layer.weight != 0, 4) == 2
    assert [done for done, _ in seen] == [t for t in range(5) for _ in range(3)]
    assert [gone for _, gone in seen] == sorted(gone for _, gone in seen)
    assert [e.message for e in journal.entries if e.kind == "fallback"] == [], "a loss that rises is no surprise here"


@pytest.mark.slow
def test_it_recovers_much_of_what_2_of_4_cost(pico, pico_model):
    step = GMP(pattern="2:4", end=0.25, **RATES)
    assert recovered(pico_model, step, texts(pico)) > 0.3


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_masks(recipe, tmp_path, monkeypatch):
    asked = recipe(GMP(steps=6, batch=2, checkpoint_every=2), save={"format": "native", "verify": "own"})
    wanted = compress.run(asked, tmp_path / "whole").report
    real, taken = GMP.growth, []

    def dying(self, steps):
        taken.append(steps)
        if len(taken) > 110:
            raise Killed
        return real(self, steps)

    monkeypatch.setattr(GMP, "growth", dying)
    with pytest.raises(Killed):
        compress.run(asked, tmp_path / "killed")
    monkeypatch.undo()
    found = compress.run(asked, tmp_path / "killed").report
    assert found["checkpoint_sha256"] == wanted["checkpoint_sha256"]
    (curve,) = [record["curve"] for record in found["training"].values()]
    assert curve == next(iter(wanted["training"].values()))["curve"]
    assert curve[0] == {"step": 0, "sparsity": 0.0} and curve[-1]["sparsity"] == 0.5
    assert found["sparsity"]["achieved"] >= 0.5 and found["sparsity"]["asked"] == 0.5
    assert found["predicted"]["tensor_bytes"] == found["size"]["tensor_bytes"], "the plan knew"


# Bad input

WRONG = {
    "end": ({"begin": 0.5, "end": 0.5}, r"the schedule ends \(0.5 of the steps\) before it begins \(0.5\)"),
    "initial": ({"initial": 0.6}, "sparsity 0.5 is not above initial 0.6; lower initial, or use finetune"),
    "2:4": ({"initial": 0.5, "pattern": "2:4"}, "sparsity 0.5 is not above initial 0.5"),
    "train": ({"train": ["norms"]}, "gmp must train weights; add weights to train"),
    "sparsity": ({"sparsity": 0.3, "pattern": "2:4"}, "pattern 2:4 fixes sparsity 0.5; leave sparsity out"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_contradict_each_other_are_errors(case):
    options, message = WRONG[case]
    with pytest.raises(RecipeError, match=message):
        compress.Recipe.from_data({"model": "m", "passes": [{"gmp": options}]})


def test_a_rate_that_diverges_names_the_step(pico_model, pico_ids):
    step = GMP(steps=12, warmup=0, learning_rate=1e30, weight_rate=1.0)
    with pytest.raises(
        NumericError, match=r"passes\[0\] gmp: the (loss|gradient's norm) is nan in step \d+ of 12; use a"
    ):
        compress.apply(pico_model, [step], pico_ids)
    check_masks(pico_model)
