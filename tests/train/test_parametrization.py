"""What a pass can say of how a weight is trained, by one that says all of it: gradient, own parameters, state, end."""

import pytest
import torch
from torch import nn

from compress.layers.linear import CompressedLinear
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.journal import Journal
from compress.train.linear import TrainedLinear
from compress.train.loop import TrainingContext, train
from compress.train.options import TrainingOptions
from compress.train.parametrization import Masked, Parametrization
from compress.train.student import KINDS, Student

IDS = torch.arange(24).reshape(6, 4)


class Drifting(Parametrization):
    """gain * (W + drift): the gain is learned, the drift grows by 1 in every step, ten times W's gradient counts."""

    parameter_kind = "norms"

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("drift", torch.zeros(()))

    def forward(self, weight):
        return self.gain * (weight + self.drift)

    def adjust(self, weight):
        weight.grad.mul_(10)

    def update(self, weight, step, total_steps):
        self.drift += 1
        return {"drift": (self.drift.clone(), 2), "done": (step, total_steps)}

    def ready(self, step, total_steps):
        return step >= 3

    def finalize(self, weight, storage):
        return quantize(self.forward(weight), GRIDS["int8"], "channel"), weight > 0


def student_of(how):
    layer = CompressedLinear.of(nn.Linear(4, 2, bias=False).requires_grad_(False))
    layer.put(torch.linspace(-1, 1, 8).reshape(2, 4))
    trained = TrainedLinear(layer)
    parameters = {kind: {} for kind in KINDS}
    parameters["weights"]["layer.weight"] = trained.train_weight(how)
    parameters[how.parameter_kind] |= {f"layer.{name}": p for name, p in how.named_parameters()}
    return Student(trained, parameters, {"layer": trained})


def loss(model, ids, rows):
    return model(ids.float() / 24).square().mean()


def run(settings, objective=loss, work=None, how=None):
    student = student_of(how or Drifting())
    record = train(student, objective, IDS, settings, TrainingContext("here", Journal(), work))
    return student, record


def test_own_parameters_are_trained_with_the_rate_of_their_kind():
    """Adam's first step is the rate along the sign: that of norms for the gain, a share of it for W."""
    before = student_of(Drifting())
    student, _ = run(TrainingOptions(steps=1, warmup=0, schedule="constant", learning_rate=0.1, weight_rate=0.01))
    moved = {name: (student.named()[name] - p).abs().max().item() for name, p in before.named().items()}
    assert moved == pytest.approx({"layer.gain": 0.1, "layer.weight": 0.001}, rel=1e-3)


def test_what_steps_tell_is_in_the_curve_as_shares():
    _, record = run(TrainingOptions(steps=3, batch=6))
    assert record["curve"][0] == {"step": 0, "drift": 0.5, "done": 0.0}
    assert [(point["drift"], point["done"]) for point in record["curve"][1:]] == [
        (1.0, 1 / 3),
        (1.5, 2 / 3),
        (2.0, 1.0),
    ]


def test_the_gradient_is_adjusted_before_it_is_clipped():
    class Watching(Drifting):
        def adjust(self, weight):
            super().adjust(weight)
            self.adjusted = weight.grad  # clipped in place later

    how = Watching()
    run(TrainingOptions(steps=1, batch=6, clip=1e-3), how=how)
    assert 0 < float(how.adjusted.norm()) <= 1e-3


class Killed(Exception):
    pass


@pytest.mark.parametrize("hold_out", [0.0, 0.3])
def test_a_killed_run_goes_on_with_buffers_and_own_parameters(tmp_path, hold_out):
    settings = TrainingOptions(steps=8, hold_out=hold_out, evaluate_every=2, checkpoint_every=3)
    wanted, curve = run(settings)
    calls = []

    def dying(model, ids, rows):
        calls.append(1)
        if len(calls) == 12 - 5 * (not hold_out):
            raise Killed
        return loss(model, ids, rows)

    with pytest.raises(Killed):
        run(settings, dying, tmp_path)
    found, again = run(settings, work=tmp_path)
    assert again["curve"] == curve["curve"]
    for name, tensor in (wanted.named() | wanted.buffers()).items():
        assert torch.equal((found.named() | found.buffers())[name], tensor)


def test_states_before_the_schedule_is_at_its_end_are_not_kept_as_the_best():
    """The drift makes the loss grow from the first step on; the best that may be kept is that of step 3."""
    settings = TrainingOptions(steps=6, learning_rate=1e-9, hold_out=0.3, evaluate_every=1)
    student, record = run(settings)
    looks = [point["held_out"] for point in record["curve"] if "held_out" in point]
    assert looks == sorted(looks) and record["best"] == {"step": 3, "held_out": looks[3]}
    assert student.buffers()["layer.drift"].item() == 4


def test_it_can_end_in_codes_and_with_a_mask_of_its_own():
    student = student_of(Drifting())
    layer = student.layers["layer"].finalize(torch.float32, torch.float32)
    wanted = quantize(torch.linspace(-1, 1, 8).reshape(2, 4), GRIDS["int8"], "channel")
    assert layer.codes is not None and torch.equal(layer.weight, CompressedLinear(wanted, None).weight)
    assert layer.mask.tolist() == [[False] * 4, [True] * 4]


def test_the_mask_that_is_there_is_the_default():
    mask = torch.eye(4, dtype=torch.bool)[:2]
    how = Masked(mask)
    weight = nn.Parameter(torch.ones(2, 4))
    how(weight).sum().backward()
    assert torch.equal(weight.grad, mask.float())
    with torch.no_grad():
        assert how.update(weight, 1, 1) == {} and torch.equal(weight, mask.float())
