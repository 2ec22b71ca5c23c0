"""Iterative pruning: sparsities of its rounds by hand, what is rewound and what not, resume, and what it recovers."""

import pytest
import torch
from pruned_training import RATES, check_masks, recovered, texts

import compress
from compress.errors import RecipeError
from compress.layers.linear import CompressedLinear
from compress.passes.prune import iterative_pruning
from compress.passes.prune.iterative_pruning import IterativePruning
from compress.train.objective import LanguageLoss

KINDS = ("finetune", "weight_rewind", "lr_rewind")


def test_every_round_removes_the_same_share_of_what_is_left():
    step = IterativePruning(sparsity=0.875, rounds=3)
    assert [step.sparsity_of(done) for done in (1, 2, 3)] == pytest.approx([0.5, 0.75, 0.875])


@pytest.fixture
def watched(monkeypatch):
    """What the loop was asked for: (weights at the start of each training, settings, span), in order."""
    seen, real = [], iterative_pruning.train

    def watching(student, objective, ids, settings, where, span):
        weights = {name: p.detach().clone() for name, p in student.named().items()}
        record = real(student, objective, ids, settings, where, span)
        seen.append((weights, settings, span, record, {n: p.detach().clone() for n, p in student.named().items()}))
        return record

    monkeypatch.setattr(iterative_pruning, "train", watching)
    return seen


@pytest.mark.parametrize("retrain", KINDS)
def test_what_a_round_starts_from_and_with_which_rates(pico_model, pico_ids, watched, retrain):
    step = IterativePruning(
        sparsity=0.5, rounds=2, retrain=retrain, rewind_to=0.5, steps=4, warmup=1, batch=2, weight_rate=1.0
    )
    compress.apply(pico_model, [step], pico_ids)
    check_masks(pico_model)
    rewinds = retrain == "weight_rewind"
    assert len(watched) == 2 + rewinds
    rates = [[point["rate"] for point in record["curve"] if "rate" in point] for _, _, _, record, _ in watched]
    if rewinds:
        (_, _, span, _, _), *rounds = watched
        kept, whole = span.saved_parameters, rates.pop(0)
        assert len(whole) == 4 and whole[2:] == rates[0] == rates[1], "the last half of the schedule"
    else:
        rounds, kept = watched, None
    for done, (start, settings, span, record, _) in enumerate(rounds):
        assert span.begin == 0.5 and record["steps"] == record["of"] == 2
        source = kept if rewinds else (watched[done - 1][4] if done else None)
        for name, weight in start.items():
            if source is not None and name.endswith("proj.weight"):
                gone = weight == 0
                assert torch.equal(weight[~gone], source[name][~gone])
                assert (
                    0.28 < float(gone.float().mean()) < 0.3 if done == 0 else 0.49 < float(gone.float().mean()) < 0.51
                )
            elif source is not None:
                assert torch.equal(weight, source[name]), "norms go the same way"
        if retrain == "finetune":
            assert settings.learning_rate == pytest.approx(0.1 * step.learning_rate)
            assert rates[done] == [1.0, 1.0]
    zeros = {name: weight == 0 for name, weight in rounds[0][0].items()}
    assert all(bool((weight[zeros[name]] == 0).all()) for name, weight in rounds[1][0].items()), "masks only shrink"


def test_at_step_0_weights_are_rewound_to_those_that_the_model_came_with(pico_model, pico_ids, watched):
    """The lottery ticket: what is left has its first value again."""
    first = pico_model.model.layers[0].mlp.up_proj.weight.detach().clone()
    step = IterativePruning(rounds=1, retrain="weight_rewind", rewind_to=0, steps=2, weight_rate=1.0, pattern="2:4")
    compress.apply(pico_model, [step], pico_ids)
    start = watched[1][0]["model.layers.0.mlp.up_proj.weight"]
    mask = pico_model.model.layers[0].mlp.up_proj.mask
    assert torch.equal(start, first * mask)
    trained = watched[0][4]["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(mask, step.pattern.keep(trained.abs(), 0.5)), "chosen by the magnitudes after training"


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("killed_in", [3, 7])
def test_a_killed_run_goes_on_in_its_round(recipe, tmp_path, monkeypatch, killed_in):
    """Four steps without pruning, of which the state after two is kept, then two rounds of two."""
    step = IterativePruning(
        rounds=2, retrain="weight_rewind", rewind_to=0.5, steps=4, checkpoint_every=2, targets="*.mlp.*"
    )
    asked = recipe(step, save={"format": "native", "verify": "own"})
    wanted = compress.run(asked, tmp_path / "whole").report
    real, taken = LanguageLoss.__call__, []

    def dying(self, model, ids, rows, *weights):
        taken.append(rows)
        if len(taken) == killed_in:
            raise Killed
        return real(self, model, ids, rows, *weights)

    monkeypatch.setattr(LanguageLoss, "__call__", dying)
    with pytest.raises(Killed):
        compress.run(asked, tmp_path / "killed")
    taken.clear()
    monkeypatch.setattr(LanguageLoss, "__call__", lambda *a: taken.append(1) or real(*a))
    found = compress.run(asked, tmp_path / "killed").report
    assert len(taken) == 8 - (killed_in - 1) // 2 * 2
    assert found["checkpoint_sha256"] == wanted["checkpoint_sha256"]
    labels = [f"passes[0] iterative_pruning, {part}" for part in ("before", "round 1", "round 2")]
    assert list(found["training"]) == labels
    for label in labels:
        assert found["training"][label]["curve"] == wanted["training"][label]["curve"]
    ends = [found["training"][label]["curve"][-1]["sparsity"] for label in labels]
    assert ends == pytest.approx([0, 1 - 0.5**0.5, 0.5], abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("retrain", KINDS)
def test_it_recovers_a_part_of_what_2_of_4_cost(pico, pico_model, retrain):
    step = IterativePruning(pattern="2:4", rounds=2, retrain=retrain, **RATES)
    assert recovered(pico_model, step, texts(pico)) > 0.2


def test_only_targets_are_pruned(pico_model, pico_ids):
    compress.apply(pico_model, [IterativePruning(rounds=1, steps=1, rewind_to=0, targets="*.0.mlp.*")], pico_ids)
    masked = [n for n, m in pico_model.named_modules() if isinstance(m, CompressedLinear) and m.mask is not None]
    assert len(masked) == 3 and all(".0.mlp." in name for name in masked)


WRONG = {
    "kind": ({"retrain": "rewind"}, "input should be 'finetune', 'weight_rewind' or 'lr_rewind'"),
    "rounds": ({"rounds": 0}, "greater than or equal to 1"),
    "rewind_to": ({"rewind_to": 1.0}, "less than 1"),
    "train": ({"train": ["scales"]}, "iterative_pruning must train weights"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_errors(case):
    options, message = WRONG[case]
    with pytest.raises(RecipeError, match=message):
        compress.Recipe.from_data({"model": "m", "passes": [{"iterative_pruning": options}]})
