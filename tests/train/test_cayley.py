"""Cayley SGD finds the known optimum of the orthogonal Procrustes problem, stays orthogonal, and resumes."""

import pytest
import torch
from killing import Killed, dying
from torch import nn

from compress.numerics.hadamard import random_orthogonal
from compress.passes.contract.journal import Journal
from compress.passes.families.learned_rotations import RotationLearning
from compress.train.cayley import CayleySGD
from compress.train.loop import TrainingContext, train
from compress.train.student import Student


def problem(size):
    """Points, their images under a rotation with noise, and the best rotation: U V^T of the SVD of A^T B."""
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(200, size, generator=draw)
    turn = random_orthogonal(size, 3).float()
    turn[0] *= torch.linalg.det(turn).sign()  # a rotation: steps cannot reach reflections from the identity
    images = points @ turn + 0.1 * torch.randn(200, size, generator=draw)
    left, _, right = torch.linalg.svd(points.T.double() @ images.double())
    return points, images, left @ right


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_optimum_of_a_procrustes_problem(momentum):
    points, images, wanted = problem(8)
    rotation = nn.Parameter(torch.eye(8))
    steps = CayleySGD([{"params": [rotation], "lr": 0.2}], momentum)
    for _ in range(300):
        rotation.grad = None
        (points @ rotation - images).square().sum(1).mean().backward()
        steps.step()
    assert float((rotation.double() - wanted).abs().max()) < 1e-4
    assert float((rotation.T @ rotation - torch.eye(8)).abs().max()) < 1e-6
    assert ("exp_avg" in steps.state[rotation]) == (momentum > 0)


def test_a_parameter_without_a_gradient_stays():
    rotation = nn.Parameter(torch.eye(3))
    CayleySGD([{"params": [rotation], "lr": 1.0}]).step()
    assert torch.equal(rotation, torch.eye(3))


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotation = nn.Parameter(torch.eye(4))


IDS = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(1))


def distance(model, ids, rows):
    return (ids[:, 0] @ model.rotation - ids[:, 1]).square().mean()


def run(work=None, objective=distance):
    model = Turned()
    options = RotationLearning(steps=9, batch=2, momentum=0.5, checkpoint_every=3, hold_out=0)
    student = Student(model, {"rotations": {"rotation": model.rotation}})
    return model.rotation, train(student, objective, IDS, options, TrainingContext("here", Journal(), work))


def test_a_killed_run_goes_on_with_its_momentum(tmp_path):
    wanted, record = run()
    with pytest.raises(Killed):
        run(tmp_path, dying(distance, 6))
    found, again = run(tmp_path)
    assert torch.equal(found, wanted) and again["curve"] == record["curve"]
    assert record["trained"] == {"rotations": 16} and record["last_loss"] < record["first_loss"]
