"""Agreement with the base model: measures against numbers worked out by hand, and the errors."""

import math

import pytest
import torch
from batches import batch_of
from headless import headless

from compress.errors import NumericError
from compress.evaluation.agreement import Agreement, answer, best_span, measures, overlap, pooled, similarities
from compress.evaluation.base import EvaluationContext
from compress.models.kinds.batch import Examples
from compress.models.terms import Compared
from compress.numerics.statistics import ranks, spearman
from compress.results.measurements.agreement import MEASURE_WORDS, Measure


def value(compared: Compared, base, other) -> dict[str, float]:
    return {name: found["value"] for name, found in measures(compared, base, other).items()}


def test_the_cosine_and_the_ranks_of_embeddings():
    base = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.5], [0.5, 3.0]]
    same = measures("embeddings", base, [[3 * x for x in row] for row in base])
    assert same["cosine"]["value"] == pytest.approx(1) and same["rank"]["value"] == pytest.approx(1)
    assert same["cosine"]["stderr"] == pytest.approx(0, abs=1e-7)
    turned = value("embeddings", base[:4], [[0.0, 1.0], *base[1:4]])
    assert turned["cosine"] == pytest.approx(3 / 4)  # one of four is orthogonal
    before = similarities(torch.tensor(base[:4]))
    after = similarities(torch.tensor([[0.0, 1.0], *base[1:4]]))
    assert turned["rank"] == pytest.approx(spearman(before.tolist(), after.tolist()))


def test_the_similarities_are_those_of_all_pairs():
    found = similarities(torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]]))
    assert found.tolist() == pytest.approx([0.0, math.sqrt(0.5), math.sqrt(0.5)])


def test_ranks_share_the_mean_rank_of_equal_values():
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert spearman([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_the_classes_and_their_divergence():
    base, other = [[[0.0, math.log(3)]], [[1.0, 0.0]]], [[[0.0, 0.0]], [[0.0, 1.0]]]
    found = measures("classes", base, other)
    assert found["same"]["value"] == 0  # argmax of equal logits is the first
    first = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    p = 1 / (1 + math.exp(-1))
    second = p * math.log(p / (1 - p)) + (1 - p) * math.log((1 - p) / p)
    assert found["kl"]["value"] == pytest.approx((first + second) / 2)
    assert value("labels", base, base) == {"same": 1.0, "kl": pytest.approx(0)}


def test_the_spans_and_their_overlap():
    far = [[0.0] * 40, [0.0] * 40]
    far[0][0] = far[1][39] = 5.0  # 40 tokens are too many, so one end decides
    first, last = best_span(torch.tensor(far))
    assert last - first < 30
    start, end = [0.0, 3.0, 0.0, 0.0], [4.0, 0.0, 2.0, 0.0]
    assert best_span(torch.tensor([start, end])) == (1, 2)  # (1, 0) would end before it starts
    assert overlap((1, 2), (2, 3)) == 0.5 and overlap((0, 0), (2, 3)) == 0 and overlap((1, 3), (1, 3)) == 1
    moved = [start, [4.0, 0.0, 0.0, 2.0]]
    assert value("spans", [[start, end]] * 2, [moved, [start, end]])["same_span"] == 0.5
    assert value("spans", [[start, end]] * 2, [moved, [start, end]])["overlap"] == pytest.approx((0.8 + 1) / 2)


def test_the_scores_rank_and_differ():
    base, other = [[0.0], [1.0], [2.0]], [[1.0], [2.0], [3.0]]
    found = value("score", base, other)
    assert found["score_rank"] == 1 and found["score_error"] == pytest.approx(1 / math.sqrt(2 / 3))
    assert value("score", [[1.0], [1.0]], [[1.0], [2.0]]) == {}  # equal scores have no order and no spread


def test_one_window_has_no_error_and_no_ranks():
    found = measures("embeddings", [[1.0, 2.0]], [[1.0, 2.0]])
    assert found == {"cosine": {"value": pytest.approx(1), "stderr": None}}


def test_the_embedding_of_a_text():
    states = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]])
    assert pooled(states, "mean").tolist() == [3.0, 5.0]
    assert pooled(states, "first").tolist() == [1.0, 2.0] and pooled(states, "last").tolist() == [5.0, 9.0]


@pytest.mark.parametrize(
    ("name", "compared", "shape"),
    [
        ("encoder", "embeddings", (32,)),
        ("classes", "classes", (1, 5)),
        ("labels", "labels", (3, 2)),
        ("tokens", "classes", (12, 4)),
        ("spans", "spans", (2, 12)),
        ("score", "score", (1,)),
    ],
)
def test_what_is_kept_of_an_answer(name, compared, shape, ids):
    assert torch.tensor(answer(headless(name), batch_of(ids(1, 12)), 0, compared)).shape == shape


def test_nan_is_an_error(ids):
    model = headless("encoder")
    model.embeddings.LayerNorm.weight.fill_(math.nan)
    with pytest.raises(NumericError, match="output is NaN or infinite on window 3"):
        answer(model, batch_of(ids(1, 12)), 3, "embeddings")


def test_a_language_model_is_not_measured_by_it(tiny, ids):
    context = EvaluationContext(run=None, texts={"a": Examples.of_ids(ids(2, 8))})
    assert Agreement().measure(tiny("llama"), context) is None


def test_a_small_error_has_two_digits():
    shown = MEASURE_WORDS["cosine"].value_text
    assert shown(Measure(value=0.99983, stderr=0.0000123)) == "0.999830 ± 0.000012"
    assert shown(Measure(value=0.98, stderr=0.01)) == "0.9800 ± 0.0100" and shown(Measure(value=1.0)) == "1.0000"
    assert MEASURE_WORDS["same"].value_text(Measure(value=0.984, stderr=0.0031)) == "98.4% ± 0.3%"
    assert (MEASURE_WORDS["same"].perfect, MEASURE_WORDS["kl"].perfect) == ("100%", "0")


def test_every_measure_has_words():
    answers = {
        "embeddings": [[1.0, 2.0], [2.0, 1.0], [0.0, 1.0]],
        "classes": [[[1.0, 2.0]]],
        "score": [[1.0], [2.0]],
        "spans": [[[1.0, 2.0], [2.0, 1.0]]],
    }
    named = {name for compared, given in answers.items() for name in measures(compared, given, given)}
    assert named == set(MEASURE_WORDS) and all("{}" in words.sentence for words in MEASURE_WORDS.values())
