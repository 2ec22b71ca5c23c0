"""The loss of models of masked tokens: what counts in it, its three parts by themselves, and what teachers are shown."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from encoders import MASK, VOCAB
from torch import nn

from compress.models.kinds.batch import IGNORED, Examples
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.masked import MaskedLM
from compress.train.objective import LanguageLoss
from compress.train.teacher import OnlineTeacher, TeacherOptions, cached_teacher

PREDICTION = MaskedLM(MASK, VOCAB, (0, 1, 2, 3, 4), seed=5)
ROWS = [3, 1]


class Answers(nn.Module):
    """A model whose logits are given, and that keeps what it was shown."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids, use_cache):
        self.shown = input_ids
        return SimpleNamespace(logits=self.logits)


def drawn(text):
    """The masked inputs and the targets of the rows."""
    shown = PREDICTION.shown(Examples.of_ids(text), ROWS).batch()
    return shown.inputs["input_ids"], shown.labels


@pytest.fixture
def words():
    """[2, 16] ids without special tokens."""
    return torch.randint(5, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))


def test_only_tokens_that_are_asked_for_count(words):
    model = Answers(torch.randn(2, 16, VOCAB, generator=torch.Generator().manual_seed(1)))
    objective = LanguageLoss(lm_objective=PREDICTION)
    loss = objective(model, Examples.of_ids(words), ROWS)
    shown, targets = drawn(words)
    assert torch.equal(model.shown, shown)
    places = (targets != IGNORED).nonzero().tolist()
    log_p = model.logits.detach().log_softmax(-1)
    by_hand = -sum(float(log_p[i, j, words[i, j]]) for i, j in places) / len(places)
    assert len(places) == 4 and loss.item() == pytest.approx(by_hand, rel=1e-5)
    loss.backward()
    assert sorted(model.logits.grad.abs().sum(-1).nonzero().tolist()) == places
    elsewhere = torch.where(targets == IGNORED, 5 + (words - 4) % 59, words)
    assert objective(model, Examples.of_ids(elsewhere), ROWS).item() == loss.item()
    there = torch.where(targets == IGNORED, words, 5 + (words - 4) % 59)
    assert abs(objective(model, Examples.of_ids(there), ROWS).item() - loss.item()) > 0.1


@pytest.fixture
def pair(tiny):
    """(student, teacher), both random."""
    return tiny("bert", seed=1), tiny("bert", seed=2)


@torch.no_grad()
def test_the_triple_loss_is_the_sum_of_its_parts(pair, words):
    """Sanh 2019, section 3: soft targets at a temperature, masked tokens, direction of the last hidden states."""
    shown, targets = drawn(words)
    mine, theirs = (model(input_ids=shown, output_hidden_states=True) for model in pair)
    soft = nn.functional.kl_div(
        (mine.logits / 2).log_softmax(-1), (theirs.logits / 2).log_softmax(-1), reduction="none", log_target=True
    )
    masked = nn.functional.cross_entropy(mine.logits.transpose(1, 2), targets, ignore_index=-100)
    ends = mine.hidden_states[-1].flatten(0, 1), theirs.hidden_states[-1].flatten(0, 1)
    cosine = nn.functional.cosine_embedding_loss(*ends, torch.ones(32))
    wanted = 0.7 * 4 * soft.sum(-1).mean() + 0.3 * masked + 0.2 * cosine
    teacher = OnlineTeacher(pair[1], 2.0, "here", PREDICTION)
    objective = LanguageLoss(0.3, temperature=2.0, teacher=teacher, cosine=0.2, lm_objective=PREDICTION)
    assert float(objective(pair[0], Examples.of_ids(words), ROWS)) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("ce_weight", [0.0, 0.3])
def test_a_teacher_that_was_asked_before_gives_the_loss_of_one_that_runs(pair, words, tmp_path, ce_weight):
    student, teacher = pair
    text = torch.cat([words.flip(1), words])
    options = TeacherOptions(2.0, VOCAB, lm_objective=PREDICTION)
    kept = cached_teacher(
        lambda: nullcontext(teacher),
        Examples.of_ids(text),
        options,
        tmp_path,
        torch.device("cpu"),
        "here",
        lambda *_: None,
    )
    online = OnlineTeacher(teacher, 2.0, "here", PREDICTION)
    losses = []
    for known in (kept, online):
        model = copy.deepcopy(student).requires_grad_(True)
        objective = LanguageLoss(ce_weight, temperature=2.0, teacher=known, token_scale=3.0, lm_objective=PREDICTION)
        loss = objective(model, Examples.of_ids(text[ROWS]), ROWS)
        loss.backward()
        losses.append((loss.item(), model.cls.predictions.transform.dense.weight.grad))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=1e-4, atol=1e-6)


def test_other_masks_are_another_question(pair, words, tmp_path):
    for seed in (0, 1, 0):
        options = TeacherOptions(1.0, 8, lm_objective=MaskedLM(MASK, VOCAB, seed=seed))
        cached_teacher(
            lambda: nullcontext(pair[1]),
            Examples.of_ids(words),
            options,
            tmp_path,
            torch.device("cpu"),
            "here",
            lambda *_: None,
        )
    assert len(list(tmp_path.glob("teacher-*"))) == 2


def test_the_answers_of_one_sequence_are_a_view_of_its_logits():
    """A copy of all logits of a long text may be gigabytes; sequences of a batch need one."""
    ids = torch.arange(12).reshape(2, 6)
    logits = torch.randn(2, 6, 16)
    both, targets = CAUSAL.answers(logits, Examples.of_ids(ids), [0, 1])
    one, first = CAUSAL.answers(logits[:1], Examples.of_ids(ids[:1]), [0])
    assert one.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr() != both.untyped_storage().data_ptr()
    assert one.equal(both[: len(one)]) and first.equal(targets[: len(one)]) and first.tolist() == [1, 2, 3, 4, 5]
