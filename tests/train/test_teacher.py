"""A teacher's outputs: kept, reused, of the same question only."""

from contextlib import contextmanager

import pytest
import torch

from compress.errors import NumericError
from compress.models.kinds.batch import Examples
from compress.numerics.metrics import soft_targets
from compress.train.teacher import OnlineTeacher, TeacherOptions, cached_teacher

CPU = torch.device("cpu")


class Opened:
    """Counts how often the teacher is opened, and how many sequences it reads."""

    def __init__(self, model):
        self.model, self.opened, self.read = model, 0, 0

    @contextmanager
    def __call__(self):
        self.opened += 1
        handle = self.model.register_forward_hook(lambda *_: setattr(self, "read", self.read + 1))
        try:
            yield self.model
        finally:
            handle.remove()


def asked(opened, ids, work=None, temperature=2.0, top_k=8, source=None, record=None):
    tell = (lambda *done: record.append(done)) if record is not None else lambda done, of: None
    return cached_teacher(
        opened, Examples.of_ids(ids), TeacherOptions(temperature, top_k, source), work, CPU, "here", tell
    )


@pytest.fixture
def teacher(tiny):
    return Opened(tiny("llama"))


@pytest.mark.parametrize("in_files", [False, True])
def test_the_targets_of_rows_are_those_of_their_logits(teacher, ids, tmp_path, in_files):
    record = []
    stored = asked(teacher, ids(), tmp_path if in_files else None, record=record)
    with torch.no_grad():
        logits = teacher.model(input_ids=ids()[[2, 0]]).logits
    wanted = soft_targets(logits.flatten(0, 1), 2.0, 8)
    found = stored(Examples.of_ids(ids()[[2, 0]]), [2, 0])
    assert torch.equal(found.index, wanted.index)
    assert torch.allclose(found.cells, wanted.cells, atol=1e-5)
    assert record == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)] and teacher.read == 4


def test_what_is_there_is_not_asked_again(teacher, ids, tmp_path):
    first = asked(teacher, ids(), tmp_path)
    again = asked(teacher, ids(), tmp_path)
    assert (teacher.opened, teacher.read) == (1, 4)
    assert torch.equal(first(Examples.of_ids(ids()), [1]).cells, again(Examples.of_ids(ids()), [1]).cells)


def test_a_killed_one_goes_on_and_a_damaged_file_is_made_again(teacher, ids, tmp_path):
    asked(teacher, ids(), tmp_path)
    first, second, *_ = sorted(tmp_path.rglob("*.safetensors"))
    wanted = first.read_bytes(), second.read_bytes()
    first.unlink()
    second.write_bytes(wanted[1][:100])
    asked(teacher, ids(), tmp_path)
    assert teacher.read == 4 + 2 and (first.read_bytes(), second.read_bytes()) == wanted


@pytest.mark.parametrize("change", ["temperature", "top_k", "source", "ids"])
def test_another_question_is_asked_anew(teacher, ids, tmp_path, change):
    asked(teacher, ids(), tmp_path)
    other = {"temperature": 1.0, "top_k": 4, "source": "other"}
    asked(teacher, ids(seed=int(change == "ids")), tmp_path, **{name: v for name, v in other.items() if name == change})
    assert teacher.read == 8


def test_all_tokens_are_kept_where_there_are_fewer_than_top_k(teacher, ids):
    found = asked(teacher, ids(), top_k=10**6)(Examples.of_ids(ids()), [0])
    assert found.index is None and found.cells.shape == (16, 64)


def test_beside_is_the_same_exactly(teacher, ids):
    stored = asked(teacher, ids(), top_k=64, temperature=1.5)(Examples.of_ids(ids()), range(4))
    live = OnlineTeacher(teacher.model, 1.5, "here")(Examples.of_ids(ids()), range(4))
    assert torch.allclose(stored.cells, live.cells, atol=1e-5) and live.index is None


def test_a_teacher_of_no_numbers_is_an_error(teacher, ids):
    teacher.model.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(NumericError, match="here: the teacher's logits are not finite"):
        asked(teacher, ids())
