"""The loop: one step by hand, resume after a kill, sequences held out, losses that are no numbers."""

import copy

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import load_file
from simulated_gpu import simulated
from torch import nn

from compress.errors import NumericError, SaveError, ShortageError
from compress.passes.contract.journal import Journal
from compress.train.loop import STATE, TrainingContext, train
from compress.train.options import TrainingOptions
from compress.train.student import KINDS, Student

IDS = torch.arange(24).reshape(6, 4)


class Point(nn.Module):
    """Three numbers that are to become those of the sequences: the least loss is at their mean."""

    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


def student_of(model=None):
    model = model or Point()
    return Student(model, {kind: {"at": model.at} if kind == "norms" else {} for kind in KINDS})


def distance(model, ids, rows):
    return (model.at - ids[:, :3].float()).square().mean()


def run(settings, objective=distance, student=None, work=None, journal=None, key=""):
    student = student or student_of()
    record = train(student, objective, IDS, settings, TrainingContext("here", journal or Journal(), work, key))
    return student.model.at.detach().clone(), record


def losses(record):
    return [point["loss"] for point in record["curve"] if "loss" in point]


def test_the_first_step_by_hand():
    """Adam's first step goes by the rate along the gradient's sign; here a quarter of it, in warm-up."""
    at, record = run(TrainingOptions(steps=1, batch=6, learning_rate=0.1))
    assert torch.allclose(at, torch.tensor([1.025, 2.025, 3.025]), atol=1e-6)
    columns = [[row[j] for row in IDS.tolist()] for j in range(3)]
    by_hand = sum((j + 1 - value) ** 2 for j, column in enumerate(columns) for value in column) / 18
    assert losses(record) == pytest.approx([by_hand])
    assert record["steps"] == record["of"] == 1 and record["trained"]["norms"] == 3


def test_accumulation_is_a_larger_batch():
    one, curve = run(TrainingOptions(steps=5, batch=4, learning_rate=0.1))
    other, again = run(TrainingOptions(steps=5, batch=1, accumulate=4, learning_rate=0.1))
    assert torch.allclose(one, other, atol=1e-6) and losses(curve) == pytest.approx(losses(again))


def test_it_finds_the_minimum():
    at, _ = run(TrainingOptions(steps=300, batch=6, learning_rate=0.5))
    assert torch.allclose(at, IDS[:, :3].float().mean(0), atol=0.05)


def test_clipping_bounds_the_gradient():
    """Only its direction is left: with SGD-like first steps of Adam nothing changes, but the moments do."""
    seen = []

    def objective(model, ids, rows):
        model.at.register_hook(lambda g: seen.append(float(g.norm())))
        return 1000 * distance(model, ids, rows)

    free, _ = run(TrainingOptions(steps=3, learning_rate=0.1), objective)
    clipped, _ = run(TrainingOptions(steps=3, learning_rate=0.1, clip=1.0), objective)
    assert min(seen) > 1 and not torch.equal(free, clipped)


class Killed(Exception):
    pass


@pytest.mark.parametrize("hold_out", [0.0, 0.3])
@pytest.mark.parametrize("killed_in", [5, 6, 7, 11])
def test_a_killed_run_goes_on_to_the_same_curve_and_the_same_bits(tmp_path, hold_out, killed_in):
    settings = TrainingOptions(
        steps=12, batch=2, learning_rate=0.2, hold_out=hold_out, evaluate_every=4, checkpoint_every=3
    )
    wanted, curve = run(settings)
    calls = []

    def dying(model, ids, rows):
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == killed_in:
                raise Killed
        return distance(model, ids, rows)

    with pytest.raises(Killed):
        run(settings, dying, work=tmp_path)
    journal, taken = Journal(), []

    def counting(model, ids, rows):
        taken.append(torch.is_grad_enabled())
        return distance(model, ids, rows)

    found, again = run(settings, counting, work=tmp_path, journal=journal)
    assert sum(taken) == 12 - (killed_in - 1) // 3 * 3
    assert torch.equal(found, wanted) and again["curve"] == curve["curve"] and again["best"] == curve["best"]
    assert any(entry.message == "training resumes" for entry in journal.entries)


def test_a_finished_training_is_not_done_again(tmp_path):
    settings = TrainingOptions(steps=4)
    wanted, curve = run(settings, work=tmp_path)

    def never(model, ids, rows):
        raise AssertionError

    found, again = run(settings, never, work=tmp_path)
    assert torch.equal(found, wanted) and again["curve"] == curve["curve"]


@pytest.mark.parametrize("change", ["settings", "start", "key"])
def test_the_state_of_another_training_is_not_taken_up(tmp_path, change):
    run(TrainingOptions(steps=4), work=tmp_path)
    settings = TrainingOptions(steps=4, seed=1) if change == "settings" else TrainingOptions(steps=4)
    student = student_of()
    if change == "start":
        student.model.at.data += 1
    key = "other" if change == "key" else ""
    found, _ = run(settings, student=copy.deepcopy(student) if change != "start" else student, work=tmp_path, key=key)
    fresh = student_of()
    if change == "start":
        fresh.model.at.data += 1
    assert torch.equal(found, run(settings, student=fresh)[0])


def test_a_damaged_state_is_not_taken_up(tmp_path):
    wanted, _ = run(TrainingOptions(steps=4), work=tmp_path)
    path = tmp_path / STATE
    path.write_bytes(path.read_bytes()[:50])
    assert torch.equal(run(TrainingOptions(steps=4), work=tmp_path)[0], wanted)


def test_the_best_state_on_what_is_held_out_is_kept_and_training_stops_early():
    """The rate is far too large: after some steps the loss only rises, and the best evaluation was earlier."""
    journal = Journal()
    settings = TrainingOptions(
        steps=60, batch=4, learning_rate=8.0, warmup=0, schedule="constant", hold_out=0.3, evaluate_every=1, patience=3
    )
    at, record = run(settings, journal=journal)
    looks = [(point["held_out"], point["step"]) for point in record["curve"] if "held_out" in point]
    best, step = min(looks)
    assert record["best"] == {"step": step, "held_out": best} and 0 < step == record["steps"] - 3
    assert record["steps"] < 60 and any("stopped early" in entry.message for entry in journal.entries)
    held = IDS[record["held_out"]]
    assert distance(Point().requires_grad_(False), held, []) > best
    model = Point()
    model.at.data = at
    assert distance(model, held, []).item() == pytest.approx(best)


def test_where_nothing_is_gained_the_start_is_kept_and_said_so():
    journal = Journal()
    settings = TrainingOptions(steps=2, learning_rate=1e4, warmup=0, hold_out=0.3, evaluate_every=1)
    at, record = run(settings, journal=journal)
    assert torch.equal(at, Point().at) and record["best"]["step"] == 0
    assert [e.message for e in journal.entries if e.kind == "fallback"] == [
        "training did not improve the loss on the held-out sequences; the model is unchanged"
    ]


def test_a_rising_loss_is_a_fallback_in_the_journal():
    journal = Journal()
    run(TrainingOptions(steps=8, batch=6, learning_rate=1e3, warmup=0), journal=journal)
    assert "the loss rose during training; use a smaller learning_rate" in [
        e.message for e in journal.entries if e.kind == "fallback"
    ]


@pytest.mark.parametrize("bad", ["loss", "gradient", "held out"])
def test_what_is_no_number_stops_it_with_the_step_and_the_last_good_state(tmp_path, bad):
    calls = []

    def objective(model, ids, rows):
        calls.append(1)
        loss = distance(model, ids, rows)
        if torch.is_grad_enabled() and len(calls) == 6 and bad != "held out":
            return loss * float("inf") if bad == "loss" else loss + (model.at[0] * 0).sqrt()
        return loss * float("nan") if bad == "held out" and not torch.is_grad_enabled() and len(calls) > 6 else loss

    hold_out = 0.2 if bad == "held out" else 0.0
    settings = TrainingOptions(steps=20, learning_rate=0.1, checkpoint_every=4, evaluate_every=7, hold_out=hold_out)
    student = student_of()
    at = (
        r"loss is nan in step 7"
        if bad == "held out"
        else rf"{'loss is inf' if bad == 'loss' else 'norm is'}.* in step 6"
    )
    with pytest.raises(NumericError, match=rf"here: the .*{at} of 20; use a smaller learning_rate.*is in "):
        run(settings, objective, student, tmp_path)
    kept = load_file(tmp_path / STATE)
    assert torch.equal(student.model.at, kept["best/at"])
    assert torch.equal(kept["best/at"], kept["parameter/at"]) == (not hold_out)
    assert torch.equal(kept["best/at"], Point().at) == bool(hold_out)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
@pytest.mark.parametrize(("batch", "hint"), [(5, "batch: 3 and accumulate: 4 give"), (1, "use shorter calibration")])
def test_a_batch_that_does_not_fit_is_told_with_one_that_may(error, batch, hint):
    calls = []

    def objective(model, ids, rows):
        calls.append(rows)
        if len(calls) > 2:
            raise error
        return distance(model, ids, rows)

    student = student_of()
    with pytest.raises(ShortageError, match=f"here: step 2 of 3 with batch: {batch} does not fit .* of cpu; {hint}"):
        run(TrainingOptions(steps=3, batch=batch, accumulate=2), objective, student)
    with pytest.raises(RuntimeError, match="something else"):
        run(TrainingOptions(steps=3), lambda *_: (_ for _ in ()).throw(RuntimeError("something else")), student)


def test_a_full_disk_is_told_and_the_state_before_stays(tmp_path, monkeypatch):
    from compress.train import checkpoint

    settings = TrainingOptions(steps=8, checkpoint_every=4)
    real, calls = checkpoint.save_file, []

    def full(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(*args, **options)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(SaveError, match="the disk is full"):
        run(settings, work=tmp_path)
    monkeypatch.undo()
    taken = []

    def counting(model, ids, rows):
        taken.append(1)
        return distance(model, ids, rows)

    found, _ = run(settings, counting, work=tmp_path)
    assert len(taken) == 4 and torch.equal(found, run(settings)[0])


def test_progress_has_the_loss():
    journal, heard = Journal(), []
    journal.listeners.append(heard.append)
    run(TrainingOptions(steps=3), journal=journal)
    steps = [entry.figures for entry in heard if entry.kind == "progress"]
    assert [figures["done"] for figures in steps] == [1, 2, 3] and all(f["of"] == 3 and f["loss"] > 0 for f in steps)


def test_one_process_trains_on_either_device_after_the_other(monkeypatch):
    """Accelerate keeps the first device of a process, as a notebook finds it."""
    for first, second in (("cuda", "cpu"), ("cpu", "cuda")):
        for state in (PartialState, AcceleratorState):
            monkeypatch.setattr(state, "_shared_state", {})
        with simulated(monkeypatch):
            for device in (first, second):
                at, _ = run(
                    TrainingOptions(steps=1, batch=6, learning_rate=0.1), student=student_of(Point().to(device))
                )
                assert at.device.type == device
                assert torch.allclose(at.cpu(), torch.tensor([1.025, 2.025, 3.025]), atol=1e-6)
        assert PartialState().device.type == first
