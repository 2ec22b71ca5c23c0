"""Lion: two steps by hand, and a choice of every training."""

import pytest
import torch
from killing import Killed, dying
from torch import nn

from compress.passes.contract.journal import Journal
from compress.train.lion import Lion
from compress.train.loop import TrainingContext, train
from compress.train.options import TrainingOptions
from compress.train.student import KINDS, Student


def test_two_steps_by_hand():
    """m = 0: sign(.1 g) with decay: 1 - .1 (1 + .5); m = .01 * 4 = .04; then c = .9 * .04 - .1 * 1 < 0: up again."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    lion = Lion([{"params": [weight], "lr": 0.1, "weight_decay": 0.5}])
    weight.grad = torch.tensor([4.0, 0.0])
    lion.step()
    assert weight.tolist() == pytest.approx([1 - 0.1 * 1.5, 2 - 0.1 * 0.5 * 2])
    assert lion.state[weight]["exp_avg"].tolist() == pytest.approx([0.04, 0.0])
    weight.grad = torch.tensor([-1.0, 1.0])
    lion.step()
    assert weight.tolist() == pytest.approx([0.85 * 0.95 + 0.1, 1.9 * 0.95 - 0.1])
    assert lion.state[weight]["exp_avg"].tolist() == pytest.approx([0.99 * 0.04 - 0.01, 0.01])


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


IDS = torch.arange(24).reshape(6, 4)


def distance(model, ids, rows):
    return (model.at - ids[:, :3].float()).square().mean()


def run(work=None, objective=distance, **options):
    model = Point()
    student = Student(model, {kind: {"at": model.at} if kind == "norms" else {} for kind in KINDS})
    settings = TrainingOptions(**{"steps": 9, "batch": 2, "learning_rate": 0.2, "checkpoint_every": 3, **options})
    return model, train(student, objective, IDS, settings, TrainingContext("here", Journal(), work))


def test_the_loop_takes_it_by_name_and_its_first_step_is_the_whole_rate():
    model, _ = run(optimizer="lion", steps=1, batch=6, warmup=0, schedule="constant")
    assert torch.allclose(model.at, torch.tensor([1.2, 2.2, 3.2]))


def test_a_killed_run_goes_on_with_its_momentum(tmp_path):
    wanted, curve = run(optimizer="lion")
    with pytest.raises(Killed):
        run(tmp_path, dying(distance, 6), optimizer="lion")
    found, again = run(tmp_path, optimizer="lion")
    assert torch.equal(found.at, wanted.at) and again["curve"] == curve["curve"]
    assert not torch.equal(run(optimizer="adamw")[0].at, wanted.at)
