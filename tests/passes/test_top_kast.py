"""Top-KAST: its two sets and one step on a 4x4 matrix by hand, its two stages, and what it recovers."""

import pytest
import torch
from pruned_training import RATES, WEIGHT, check_masks, in_training, recovered, stepped, texts
from torch import nn

import compress
from compress.errors import RecipeError
from compress.numerics.sparse.masks import Pattern
from compress.passes.prune.top_kast import TopKAST

STEP = TopKAST(pattern="layer", sparsity=0.5, backward_sparsity=0.25, penalty=0.1)
A = WEIGHT.abs() > 0.55
B = WEIGHT.abs() > 0.15


def test_one_step_by_hand():
    """Gradient 1 in B; penalty .1: .8 in A becomes .8 - .1 (1 + .08), -.5 in B alone -.5 - .1 (1 - .1 * .5 / .5)."""
    linear, weight = in_training(STEP)
    linear.update(0, 10)
    assert torch.equal(linear.parametrization.mask, A) and torch.equal(linear.parametrization.outer, B)
    assert torch.equal(linear.parametrization(weight), WEIGHT * A)
    stepped(linear, weight, torch.ones(4, 4), 0.1, 1, 10)
    assert weight[1, 1].item() == pytest.approx(0.692) and weight[2, 0].item() == pytest.approx(-0.59)
    wanted = WEIGHT - 0.1 * (B + 0.1 * WEIGHT * (A + 2.0 * (B & ~A)))
    assert torch.allclose(weight, wanted) and torch.equal(weight[~B], WEIGHT[~B])


def test_the_sets_are_chosen_anew_until_refinement_where_they_are_one():
    linear, weight = in_training(TopKAST(pattern="layer", backward_sparsity=0.25, explore=0.5))
    linear.update(0, 4)
    gradient = torch.zeros(4, 4)
    gradient[2, 0], gradient[0, 2] = 4.0, 9.0
    assert stepped(linear, weight, gradient, 0.1, 1, 4) == {"flips": (4, 16)}, "-.5 and .2 become -.9 and -.7"
    sets = linear.parametrization
    assert bool(sets.mask[2, 0]) and bool(sets.mask[0, 2]) and int(sets.mask.sum()) == 8 and int(sets.outer.sum()) == 12
    found = sets.mask.clone()
    for done in (2, 3, 4):
        assert stepped(linear, weight, -20 * gradient, 0.1, done, 4) == {"flips": (0, 16)}
        assert torch.equal(sets.mask, found) and torch.equal(sets.outer, found)
    settled = linear.finalize(torch.float32, torch.float32)
    assert torch.equal(settled.mask, found) and torch.equal(settled.weight, weight * found)


def test_what_is_outside_of_both_sets_rests_although_the_optimizer_has_momentum():
    linear, weight = in_training(STEP)
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    for done in range(6):
        linear.update(done, 100)
        outer, before = linear.parametrization.outer.clone(), weight.detach().clone()
        optimizer.zero_grad()
        (
            linear.parametrization(weight) * torch.randn(4, 4, generator=torch.Generator().manual_seed(done))
        ).sum().backward()
        linear.adjust()
        optimizer.step()
        linear.update(done + 1, 100)
        assert torch.equal(weight[~outer], before[~outer]) and not torch.equal(weight[outer], before[outer])


def test_two_of_four_train_three_of_four():
    step = TopKAST(pattern="2:4", backward_sparsity=0.25)
    linear, _ = in_training(step)
    linear.update(0, 4)
    sets = linear.parametrization
    assert sets.mask.sum(1).tolist() == [2] * 4 and sets.outer.sum(1).tolist() == [3] * 4
    assert bool((sets.outer | ~sets.mask).all())
    assert TopKAST(pattern="2:4", backward_sparsity=0).wide(Pattern("2:4")) is None


def test_masks_hold_on_a_model(pico_model, pico_ids):
    step = TopKAST(pattern="2:4", steps=4, batch=2, weight_rate=1.0)
    compress.apply(pico_model, [step], pico_ids)
    check_masks(pico_model, 2, 4)


def test_an_earlier_mask_holds(pico_model, pico_ids):
    layer = "model.layers.1.mlp.down_proj"
    compress.apply(pico_model, [compress.Magnitude(sparsity=0.6, targets=layer)])
    before = pico_model.get_submodule(layer).mask
    compress.apply(pico_model, [TopKAST(targets=layer, steps=2, weight_rate=1.0)], pico_ids)
    after = pico_model.get_submodule(layer)
    assert bool((before | ~after.mask).all()) and bool((after.weight[~after.mask] == 0).all())


@pytest.mark.slow
def test_it_recovers_much_of_what_2_of_4_cost(pico, pico_model):
    step = TopKAST(pattern="2:4", **RATES)
    assert recovered(pico_model, step, texts(pico)) > 0.4


WRONG = {
    "as sparse": (
        {"backward_sparsity": 0.5},
        "backward_sparsity 0.5 must be below sparsity, 0.5: more weights must be tr",
    ),
    "2:4": (
        {"pattern": "2:4", "backward_sparsity": 0.4},
        "backward_sparsity 0.4 of pattern 2:4 trains no more weights than it keeps; lower it by at least 1/4",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_sets_that_cannot_be_are_errors(case):
    options, message = WRONG[case]
    with pytest.raises(RecipeError, match=message):
        compress.Recipe.from_data({"model": "m", "passes": [{"top_kast": options}]})


def test_it_is_no_dense_layer_any_more(pico_model, pico_ids):
    compress.apply(pico_model, [TopKAST(steps=1, targets="*.0.mlp.up_proj")], pico_ids)
    assert not isinstance(pico_model.model.layers[0].mlp.up_proj, nn.Linear)
