"""Lockstep: every batch waits where a stage begins until it is solved; the outputs are those of the solved block."""

import gc
import weakref

import pytest
import torch
from torch import nn

from compress.blockwise.lockstep import lockstep, run_in_turn

WIDTH = 4
STAGES = [("a",), ("b", "c"), ("d",)]


class Block(nn.Module):
    """a -> (b, c) -> d, each in the order of its name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x):
        h = self.a(x)
        return self.d(self.b(h) * self.c(h))


def batches(count):
    return list(torch.randn(count, 2, 3, WIDTH, generator=torch.Generator().manual_seed(1)))


def forwards_of(block, inputs):
    return [lambda x=x: block(x) for x in inputs]


def run(block, inputs, stages=STAGES, solve=lambda stage: None):
    """(outputs, events): events are ('arrive', stage, name) and ('solve', stage) in order."""
    events = []

    def solved(stage):
        events.append(("solve", stage))
        solve(stage)

    arrive = lambda stage, name, rows: events.append(("arrive", stage, name))  # noqa: E731
    return lockstep(block, stages, forwards_of(block, inputs), arrive, solved), events


def test_all_batches_arrive_at_a_stage_before_it_is_solved():
    _, events = run(Block(), batches(3))
    expected = []
    for stage, name in enumerate("abd"):  # c reads what b reads, and is not announced again
        expected += [("arrive", stage, name)] * 3 + [("solve", stage)]
    assert events == expected


def test_rows_are_the_inputs_of_the_solved_block():
    block, inputs, seen = Block(), batches(5), {}

    def solve(stage):
        for name in STAGES[stage]:
            block.get_submodule(name).weight *= 0.5

    def arrive(stage, name, rows):
        assert rows.shape == (6, WIDTH)
        seen.setdefault(name, []).append(rows.clone())

    outputs = lockstep(block, STAGES, forwards_of(block, inputs), arrive, solve)
    for i, x in enumerate(inputs):
        assert torch.equal(outputs[i], block(x))  # the block as it is now, all its weights halved
        h = block.a(x)
        assert torch.equal(seen["a"][i], x.reshape(-1, WIDTH))
        assert torch.equal(seen["b"][i], h.reshape(-1, WIDTH))
        assert torch.equal(seen["d"][i], (block.b(h) * block.c(h)).reshape(-1, WIDTH))


@pytest.mark.parametrize("count", [0, 1, 200])
def test_any_number_of_batches(count):
    block = Block()
    outputs, events = run(block, batches(count))
    assert [torch.equal(y, block(x)) for x, y in zip(batches(count), outputs, strict=True)] == [True] * count
    assert [event[1] for event in events if event[0] == "solve"] == [0, 1, 2]


def test_a_stage_that_no_batch_reaches_is_solved_at_the_end():
    block = Block()
    block.unused = nn.Linear(WIDTH, WIDTH)
    _, events = run(block, batches(2), [("a",), ("unused",), ("b", "c"), ("d",)])
    assert [event[1] for event in events if event[0] == "solve"] == [0, 2, 3, 1]
    assert not any(event[1] == 1 for event in events if event[0] == "arrive")


class Forked(nn.Module):
    """Rows whose sum is positive go through `left`, the others through `right`, as experts do; then `out`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, x):
        return self.out(self.left(x) if bool(x.sum() > 0) else self.right(x))


def test_batches_may_take_different_ways():
    block, ones = Forked(), torch.ones(1, WIDTH)
    inputs = [ones, -ones, 2 * ones, -3 * ones]
    outputs, events = run(block, inputs, [("left",), ("right",), ("out",)])
    assert [torch.equal(y, block(x)) for x, y in zip(inputs, outputs, strict=True)] == [True] * 4
    arrived = [event[1] for event in events if event[0] == "arrive"]
    assert sorted(arrived) == [0, 0, 1, 1, 2, 2, 2, 2]
    solved = events.index(("solve", 2))
    assert all(events.index(("solve", stage)) < solved for stage in (0, 1))
    assert all(event[0] == "solve" for event in events[solved:])  # nobody comes to `out` after it was solved


def test_between_two_solves_the_inputs_of_one_stage_arrive():
    """Batches that pass by `left` wait at later stages meanwhile; no statistics of those are needed yet."""
    ones = torch.ones(1, WIDTH)
    _, events = run(Forked(), [-ones, ones, -2 * ones, 2 * ones], [("left",), ("right",), ("out",)])
    stages = [event[1] for event in events]
    assert stages == sorted(stages) and stages == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]


def test_solving_may_run_the_linears_themselves():
    block = Block()
    run(block, batches(2), solve=lambda stage: block.get_submodule(STAGES[stage][0])(torch.ones(1, WIDTH)))


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["batch", "arrive", "solve"])
def test_an_exception_comes_through_and_leaves_nothing_behind(where):
    block, inputs, alive = Block(), batches(4), []

    def fail(*_):
        raise Stop

    def watched(x):
        kept = x.clone()
        alive.append(weakref.ref(kept))
        return block(kept) + 0 * kept.sum()

    forwards = [lambda x=x: watched(x) for x in inputs]
    if where == "batch":
        forwards[2] = fail
    raised = None
    try:
        lockstep(
            block,
            STAGES,
            forwards,
            fail if where == "arrive" else lambda *_: None,
            fail if where == "solve" else lambda stage: None,
        )
    except Stop as error:
        raised = error  # its traceback holds on to the frame of lockstep
    assert raised is not None
    assert not any(module._forward_pre_hooks for module in block.modules())
    gc.collect()
    living = sum(ref() is not None for ref in alive)
    assert living <= (1 if where == "arrive" else 0)  # the batch that failed itself stands in the traceback


def test_the_failing_batch_is_the_one_whose_error_is_raised():
    block, reached = Block(), []

    def second():
        reached.append(True)
        h = block.a(batches(1)[0])
        raise ValueError(f"after a: {tuple(h.shape)}")

    forwards = [*forwards_of(block, batches(1)), second]
    with pytest.raises(ValueError, match=r"after a: \(2, 3, 4\)"):
        lockstep(block, STAGES, forwards, lambda *_: None, lambda stage: None)
    assert reached == [True]


def test_in_turn_every_batch_goes_as_far_as_its_last_stage():
    block, events, ran = Block(), [], []
    block.d.register_forward_hook(lambda module, args, output: ran.append(output))
    arrive = lambda stage, name, rows: events.append((stage, name, rows))  # noqa: E731
    inputs = batches(2)
    run_in_turn(block, STAGES, forwards_of(block, inputs), arrive)
    assert [(stage, name) for stage, name, _ in events] == [(0, "a"), (1, "b"), (2, "d")] * 2
    assert not ran, "something after the last stage was computed"
    for i, x in enumerate(inputs):
        h = block.a(x)
        for (_, _, rows), wanted in zip(events[3 * i : 3 * i + 3], (x, h, block.b(h) * block.c(h)), strict=True):
            assert torch.equal(rows, wanted.reshape(-1, WIDTH))
    block(inputs[0])
    assert len(events) == 6 and len(ran) == 1


def test_in_turn_a_batch_that_does_not_come_by_a_stage_runs_to_its_end():
    block, events = Block(), []
    short = lambda: block.a(batches(1)[0])  # noqa: E731
    run_in_turn(block, STAGES, [short, *forwards_of(block, batches(1))], lambda stage, name, rows: events.append(stage))
    assert events == [0, 0, 1, 2]


def test_in_turn_errors_come_through_and_hooks_go():
    block, events = Block(), []

    def failing():
        block.a(batches(1)[0])
        raise ValueError("no such luck")

    with pytest.raises(ValueError, match="no such luck"):
        run_in_turn(block, STAGES, [failing], lambda *found: events.append(found))
    block(batches(1)[0])
    assert len(events) == 1
