"""Which sequences every step sees, and at which rate: by hand."""

import math

import pytest
import torch
from pydantic import ValidationError

from compress.train.options import TrainingOptions


def test_every_sequence_is_seen_once_in_every_epoch():
    order = TrainingOptions(epochs=3, batch=2, accumulate=2).order(list(range(8)), processes=1)
    assert order.shape == (6, 2, 2)
    for epoch in order.view(3, 8):
        assert sorted(epoch.tolist()) == list(range(8))
    assert order.view(3, 8)[0].tolist() != order.view(3, 8)[1].tolist()


def test_epochs_are_filled_up_to_whole_steps_and_steps_go_round_as_often_as_needed():
    assert TrainingOptions(epochs=1, batch=4).order(list(range(6)), 1).shape == (2, 1, 4)
    assert TrainingOptions(epochs=0.1).order(list(range(6)), 1).shape == (1, 1, 1)
    assert TrainingOptions(steps=7, batch=3).order([4, 5], 1).unique().tolist() == [4, 5]
    assert TrainingOptions().order([0, 1, 2], 1).shape == (6, 1, 1)


def test_processes_share_a_step_as_more_accumulation_would():
    """Two processes with accumulation 2 see in each step what one with accumulation 4 sees."""
    settings = {"steps": 3, "batch": 2, "seed": 5}
    two = TrainingOptions(accumulate=2, **settings).order(list(range(9)), 2)
    one = TrainingOptions(accumulate=4, **settings).order(list(range(9)), 1)
    assert torch.equal(two, one)


def test_the_seed_shuffles():
    rows = list(range(32))
    assert torch.equal(TrainingOptions(seed=1).order(rows, 1), TrainingOptions(seed=1).order(rows, 1))
    assert not torch.equal(TrainingOptions(seed=1).order(rows, 1), TrainingOptions(seed=2).order(rows, 1))


@pytest.mark.parametrize(("share", "sequences", "held"), [(0.25, 8, 2), (0.01, 8, 1), (0.9, 2, 1), (0.0, 8, 0)])
def test_sequences_held_out_are_trained_on_by_none(share, sequences, held):
    train, out = TrainingOptions(hold_out=share).split(sequences)
    assert len(out) == held and sorted(train + out) == list(range(sequences))


def test_rates_rise_to_the_highest_and_fall_towards_zero():
    """k + 1 of 4 in warm-up, then (1 + cos) / 2 of the way to the step behind the last."""
    rates = TrainingOptions(warmup=4).rates(12).tolist()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == pytest.approx([(1 + math.cos(math.pi * (k - 3) / 9)) / 2 for k in range(4, 12)])
    assert min(rates) > 0
    assert TrainingOptions(warmup=2, schedule="constant").rates(4).tolist() == [0.5, 1, 1, 1]
    assert TrainingOptions(warmup=0, schedule="linear").rates(3).tolist() == pytest.approx([0.75, 0.5, 0.25])


def test_rates_by_kind():
    settings = TrainingOptions(learning_rate=0.01, weight_rate=0.1, weight_decay=0.5)
    rates = {kind: settings.rate_of(kind) for kind in ("scales", "norms", "weights", "biases")}
    assert rates == pytest.approx({"scales": 0.01, "norms": 0.01, "weights": 0.001, "biases": 0.001})
    assert [settings.decay_of(kind) for kind in rates] == [0, 0, 0.5, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3, "epochs": 1}, "both set the length of training"),
        ({"patience": 2}, "patience needs held-out sequences"),
        ({"train": ["scale"]}, "'scales', 'norms', 'weights' or 'biases'"),
        ({"train": []}, "at least 1"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"hold_out": 1}, "less than 1"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"schedule": "cosin"}, "'cosine', 'linear' or 'constant'"),
        ({"precision": "fp16"}, "'no' or 'bf16'"),
        ({"batch": 0}, "greater than or equal to 1"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        TrainingOptions(**options)
