"""Perplexity against a calculation by hand, and the protocol of windows."""

import math
from types import SimpleNamespace

import pytest
import torch
from encoders import tokenizer
from torch import nn

from compress.errors import ModelError, NumericError
from compress.evaluation.perplexity import exponential, perplexity
from compress.models.forward import mean_loss
from compress.models.kinds.batch import Examples
from compress.models.kinds.kinds import objective_of
from compress.numerics import metrics

ROWS = 16  # tokens in a chunk


class Bigrams(nn.Module):
    """The logits after token t are row t of a table; it wants one window at a time and no cache."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, input_ids, use_cache):
        assert input_ids.shape[0] == 1 and use_cache is False
        return SimpleNamespace(logits=self.table[input_ids])


def test_by_hand():
    chances = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1 / 3, 1 / 3, 1 / 3]])
    found = perplexity(Bigrams(chances.log()), torch.tensor([[0, 1, 1], [2, 0, 0]]))
    # 0 -> 1: 1/4, 1 -> 1: 4/5; 2 -> 0: 1/3, 0 -> 0: 1/2; nothing is asked of the first tokens, nor across windows
    wanted = -(math.log(1 / 4) + math.log(4 / 5) + math.log(1 / 3) + math.log(1 / 2)) / 4
    assert found.loss == pytest.approx(wanted, rel=1e-6) and found.tokens == 4
    assert found.perplexity == pytest.approx(30 ** (1 / 4), rel=1e-6)


@pytest.mark.parametrize("length", [16, 40])
def test_of_masked_tokens_it_is_their_mean_loss_under_masks_that_all_models_share(length, tiny, ids):
    lm_objective = objective_of(tiny("bert"), tokenizer())
    text = ids(3, length)
    found = [perplexity(tiny("bert", seed), text, lm_objective=lm_objective) for seed in (0, 1)]
    assert {one.tokens for one in found} == {sum(round(0.15 * int((row > 4).sum())) for row in text)}
    assert {one.of for one in found} == {"masked tokens"} and found[0].loss != found[1].loss
    shown = lm_objective.shown(Examples.of_ids(text), range(3)).batch()
    targets = shown.labels
    with torch.no_grad():
        logits = tiny("bert")(**shown.inputs).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert found[0].loss == pytest.approx(float(wanted), rel=1e-5)
    assert mean_loss(tiny("bert"), Examples.of_ids(text), lm_objective) == pytest.approx(float(wanted), rel=1e-5)


def test_masked_tokens_are_not_taken_for_next_ones(tiny, ids):
    with pytest.raises(ModelError, match="does not predict next tokens; use objective_of"):
        perplexity(tiny("bert"), ids(1))


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    assert perplexity(Bigrams(torch.zeros(7, 7)), torch.arange(7)[None]).perplexity == pytest.approx(7, rel=1e-6)


@pytest.mark.parametrize("length", [2, ROWS, ROWS + 1, ROWS + 2, 3 * ROWS])
def test_it_is_the_mean_over_windows_of_the_mean_loss_of_a_window(length, tiny, monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", ROWS * 64)
    model = tiny("llama", max_position_embeddings=3 * ROWS)
    ids = torch.randint(64, (3, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        losses = [float(model(input_ids=window[None], labels=window[None]).loss) for window in ids]
    found = perplexity(model, ids)
    assert found.loss == pytest.approx(sum(losses) / 3, rel=1e-5) and found.tokens == 3 * (length - 1)


def test_progress_is_told_after_every_window():
    record = []
    perplexity(Bigrams(torch.zeros(3, 3)), torch.zeros(4, 2, dtype=torch.int64), lambda *at: record.append(at))
    assert record == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_loss_that_is_not_a_number_names_the_window():
    table = torch.zeros(3, 3)
    table[2] = float("nan")
    with pytest.raises(NumericError, match="the model's loss is NaN on window 1"):
        perplexity(Bigrams(table), torch.tensor([[0, 1, 0], [2, 1, 0]]))


def test_a_loss_too_large_for_its_exponential():
    assert exponential(800.0) == math.inf and exponential(0.0) == 1
