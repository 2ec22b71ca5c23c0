"""The verdict on a text: Student's intervals, equivalence margins, and the rate of false verdicts."""

import numpy as np
import pytest
from scipy import stats

from compress.numerics.statistics import holm, mean, student_95
from compress.results.measurements.perplexity import Difference, Divergence, Score, TextQuality
from compress.results.verdict import KL_MARGIN, LOSS_MARGIN, MIN_WINDOWS, OUTCOMES, interval, verdict_of

SCORE = Score(loss=3.0, tokens=100, seconds=1.0, of="next tokens", perplexity=20.0)


def text(loss, stderr, windows=16, kl=None, kl_stderr=0.0, agreement=0.99):
    divergence = None
    if kl is not None:
        divergence = Divergence(
            mean=kl,
            stderr=kl_stderr,
            median=kl,
            p99=kl,
            agreement=agreement,
            agreement_stderr=0.001,
            top_k=128,
            by_position=[],
        )
    difference = Difference(loss=loss, stderr=stderr)
    return TextQuality(
        text="a",
        windows=windows,
        length=64,
        sha256="",
        base=SCORE,
        compressed=SCORE,
        difference=difference,
        divergence=divergence,
    )


@pytest.mark.parametrize(
    ("outcome", "facts"),
    [
        ("worse", {"loss": 0.05, "stderr": 0.01, "kl": 0.04}),
        ("worse", {"loss": 0.05, "stderr": 0.01}),  # the loss alone shows that
        ("better", {"loss": -0.05, "stderr": 0.01, "kl": 0.04}),
        ("no visible loss", {"loss": 0.001, "stderr": 0.002, "kl": 0.001, "kl_stderr": 1e-4}),
        ("no visible loss", {"loss": 0.001, "stderr": 0.0002, "kl": 0.001, "kl_stderr": 1e-4}),  # real, but tiny
        ("undecided", {"loss": 0.001, "stderr": 0.002}),  # no KL, so equal predictions are not shown
        ("undecided", {"loss": 0.001, "stderr": 0.02, "kl": 0.001, "kl_stderr": 1e-4}),
        ("different predictions", {"loss": 0.32, "stderr": 0.33, "kl": 1.09, "kl_stderr": 0.08, "agreement": 0.398}),
        ("different predictions", {"loss": 0.001, "stderr": 0.001, "kl": 0.001, "kl_stderr": 1e-4, "agreement": 0.9}),
        ("undecided", {"loss": 0.05, "stderr": 0.001, "kl": 0.04, "windows": MIN_WINDOWS - 1}),
        ("undecided", {"loss": 0.05, "stderr": None, "kl": 0.04, "windows": 1}),
    ],
)
def test_outcomes_by_hand(outcome, facts):
    assert verdict_of(text(**facts)).outcome == outcome and outcome in OUTCOMES


def test_an_undecided_verdict_says_what_to_measure():
    assert verdict_of(text(0.05, None, windows=1)).reason == f"1 window of text; measure {MIN_WINDOWS} or more"
    assert "top_k" in verdict_of(text(0.0, 0.002)).reason
    assert verdict_of(text(0.0, 0.02, kl=0.001)).reason == "measure more windows"
    assert "KL divergence 1.1 nats, 60.2%" in verdict_of(text(0.32, 0.33, kl=1.09, agreement=0.398)).reason


def test_a_model_without_base_has_no_verdict():
    assert verdict_of(text(0.0, None).model_copy(update={"difference": None})) is None


@pytest.mark.parametrize("windows", [2, 8, 16, 100])
def test_intervals_are_those_of_students_distribution(windows):
    values = np.random.default_rng(windows).normal(0.3, 1.0, windows)
    estimate = mean(list(values))
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval(*estimate, windows) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize("windows", [MIN_WINDOWS, 16])
def test_at_most_one_in_twenty_equal_models_is_called_unequal(windows):
    """Two standard errors, whatever the number of windows, gave 8.6% at 8 windows and 6.4% at 16."""
    samples = np.random.default_rng(0).normal(0.0, 1.0, (4000, windows))
    outcomes = [verdict_of(text(*mean(list(sample)), windows=windows, kl=0.02)).outcome for sample in samples]
    share = np.mean([outcome in ("worse", "better") for outcome in outcomes])
    assert 0.04 < share < 0.06


def test_unequal_models_are_rarely_called_equal():
    """At a true difference of one margin, the interval lies inside of the margins in at most 2.5% of the cases."""
    samples = np.random.default_rng(1).normal(LOSS_MARGIN, LOSS_MARGIN, (4000, 16))
    outcomes = [verdict_of(text(*mean(list(sample)), kl=KL_MARGIN / 10)).outcome for sample in samples]
    assert np.mean([outcome == "no visible loss" for outcome in outcomes]) < 0.032


def test_quantiles_of_student():
    assert student_95(2) == pytest.approx(12.706, abs=1e-3) and student_95(16) == pytest.approx(2.131, abs=1e-3)


def test_holms_correction_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == [] and holm([0.02]) == [0.02]
