"""SR-STE: one step on a 4x4 matrix by hand, the sign of its decay, masks that flip, and what it recovers."""

import pytest
import torch
from masks import most_of
from pruned_training import RATES, WEIGHT, check_masks, in_training, recovered, stepped, texts

import compress
from compress.errors import RecipeError
from compress.passes.contract.journal import Journal
from compress.passes.prune.sr_ste import SRSTE

KEPT = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)
GRADIENT = torch.tensor([[1.0, -1.0, -2.0, 0.0], [0] * 4, [0] * 4, [0] * 4])


def test_one_step_by_hand():
    """W - 0.1 (g + 0.5 (1 - mask) W): .2 is pruned, its gradient -2: .2 - .1 (-2 + .5 * .2) = .39, and it is kept."""
    linear, weight = in_training(SRSTE(decay=0.5))
    assert linear.update(0, 5) == {} and torch.equal(linear.parametrization.mask, KEPT)
    assert torch.equal(linear.parametrization(weight), WEIGHT * KEPT)
    record = stepped(linear, weight, GRADIENT, 0.1, 1, 5)
    wanted = torch.tensor(
        [
            [0.3, -0.2, 0.39, 0.095],
            [0.095, 0.8, -0.7, 0.57],
            [-0.5, 0.6, 0.0475, -0.038],
            [0.855, 0.95, -1.1, 1.2],
        ]
    )
    assert torch.allclose(weight, wanted, atol=1e-6)
    assert linear.parametrization.mask[0].tolist() == [True, False, True, False]
    assert torch.equal(linear.parametrization.mask[1:], KEPT[1:]) and record == {"flips": (2, 16)}
    settled = linear.finalize(torch.float32, torch.float32)
    assert torch.equal(settled.weight, weight * settled.mask)
    assert torch.equal(settled.mask, linear.parametrization.mask)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_pruned_weights_shrink_by_the_decay_and_without_one_get_the_plain_gradient(decay):
    linear, weight = in_training(SRSTE(decay=decay))
    linear.update(0, 5)
    stepped(linear, weight, torch.zeros(4, 4), 0.1, 1, 5)
    assert torch.allclose(weight, WEIGHT * (1 - 0.1 * decay * ~KEPT))
    stepped(linear, weight, torch.ones(4, 4), 0.0, 2, 5)
    assert torch.equal(weight.grad, torch.ones(4, 4)), "straight through to all of W"


@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_the_decay_does_not_depend_on_the_size_of_the_gradient(size):
    """Adam divides a gradient by its average; a decay inside of it would be of no size of its own."""
    linear, weight = in_training(SRSTE(decay=2.0))
    optimizer, before = torch.optim.AdamW([weight], lr=0.01, weight_decay=0), weight.detach().clone()
    linear.update(0, 5)
    (linear.parametrization(weight) * size).sum().backward()
    linear.adjust()
    linear.decay(0.01)
    optimizer.step()
    wanted = before * (1 - 0.01 * 2.0 * ~KEPT) - 0.01
    assert torch.allclose(weight, wanted, atol=2e-4)


def test_the_mask_is_that_of_the_largest_weights_after_every_step(pico_model, pico_ids):
    seen = []

    class Watching(SRSTE):
        def parametrize(self, name, layer):
            made = super().parametrize(name, layer)
            real = made.update

            def update(weight, done, of):
                record = real(weight, done, of)
                assert torch.equal(made(weight) != 0, self.pattern.keep(weight.abs(), 0.5))
                seen.append((name, done, "flips" in record))
                return record

            made.update = update
            return made

    compress.apply(pico_model, [Watching(steps=3, batch=2, weight_rate=1.0)], pico_ids)
    check_masks(pico_model, 2, 4)
    assert [(done, flips) for _, done, flips in seen] == [(t, t > 0) for t in range(4) for _ in range(21)]


def test_flips_are_in_the_report(recipe, tmp_path):
    asked = recipe(SRSTE(steps=3, batch=2, weight_rate=1.0), save={"format": "dense", "verify": "own"})
    report = compress.run(asked, tmp_path).report
    (record,) = report["training"].values()
    flips = [point["flips"] for point in record["curve"] if "flips" in point]
    assert len(flips) == 3 and all(0 < share < 0.5 for share in flips)
    assert report["sparsity"]["achieved"] >= report["sparsity"]["due"] == 0.5


@pytest.mark.slow
def test_it_recovers_much_of_what_2_of_4_cost(pico, pico_model):
    step = SRSTE(**RATES)
    assert recovered(pico_model, step, texts(pico)) > 0.4


@pytest.mark.parametrize("regrow", [False, True])
def test_what_was_pruned_before_comes_back_only_if_it_may(pico_model, pico_ids, regrow):
    targets, journal = "*.1.mlp.down_proj", Journal()
    compress.apply(pico_model, [compress.Wanda(pattern="2:4", targets=targets)], pico_ids)
    before = pico_model.model.layers[1].mlp.down_proj.mask
    step = SRSTE(targets=targets, train=["weights"], steps=2, warmup=0, weight_rate=10.0, regrow=regrow)
    compress.apply(pico_model, [step], pico_ids, journal=journal)
    after = pico_model.model.layers[1].mlp.down_proj
    assert bool((after.weight[~after.mask] == 0).all()) and most_of(after.mask, 4) == 2
    assert torch.equal(after.mask, before) != regrow
    fallbacks = [(e.message, e.figures["layers"]) for e in journal.entries if "pruned earlier" in e.message]
    message = "these layers were pruned earlier, so their masks do not change; add regrow: true to let them change"
    assert fallbacks == ([] if regrow else [(message, 1)])


def test_other_patterns_are_refused():
    with pytest.raises(RecipeError, match='pattern row is not N:M; write "2:4", or use gmp or top_kast'):
        compress.Recipe.from_data({"model": "m", "passes": [{"sr_ste": {"pattern": "row"}}]})
