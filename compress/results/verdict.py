"""Decide what loss, divergence and changed predictions on a text say together about a compressed model.

An interval is a 95% confidence interval by Student's t distribution, with windows of text as the units of sampling.
"No visible loss" is a statement of equivalence (two one-sided tests, Schuirmann 1987): the intervals lie inside
margins. It is never concluded from an interval that merely contains zero.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from compress.numerics.statistics import student_95
from compress.results.measurements.perplexity import TextQuality

MIN_WINDOWS = 8
"""Windows below which there is no verdict: the standard error itself is then uncertain by more than 25%."""

LOSS_MARGIN = 0.01
"""Nats per token within which two losses count as equal: 1% of the perplexity."""
KL_MARGIN = 0.01
"""Nats per token of KL divergence within which two models count as equal."""
FLIPS_MARGIN = 0.05
"""Fraction of positions whose most likely token may differ between models that count as equal."""

Outcome = Literal["no visible loss", "better", "undecided", "different predictions", "worse"]
"""What the measurements show, from the mildest outcome to the most severe.

worse, better: the interval of the loss difference excludes zero. different predictions: that of the loss difference
does not, but the KL divergence or the changed predictions exceed their margins. undecided: the intervals are too wide,
there are too few windows, or the divergence was not measured.
"""

OUTCOMES: tuple[Outcome, ...] = ("no visible loss", "better", "undecided", "different predictions", "worse")


class ConfidenceInterval(NamedTuple):
    """A 95% confidence interval."""

    low: float
    high: float

    def inside(self, margin: float) -> bool:
        """Return whether the interval lies between -margin and margin."""
        return -margin < self.low and self.high < margin


class Verdict(NamedTuple):
    """The outcome on a text and what it follows from.

    Attributes:
        outcome: what the measurements show.
        reason: why they show no more, and what to measure; empty if the loss difference decides.
    """

    outcome: Outcome
    reason: str = ""

    @property
    def tone(self) -> Literal["good", "bad", "plain"]:
        """The color of figures with this outcome."""
        return (
            "bad"
            if self.outcome in ("worse", "different predictions")
            else "plain"
            if self.outcome == "undecided"
            else "good"
        )


def interval(value: float, stderr: float | None, windows: int) -> ConfidenceInterval | None:
    """Return the 95% interval of a mean over windows; None if its standard error is unknown."""
    if stderr is None or windows < 2:
        return None
    half = student_95(windows) * stderr
    return ConfidenceInterval(value - half, value + half)


def verdict_of(text: TextQuality) -> Verdict | None:
    """Return the verdict on a text; None if the model was not compared with a base."""
    if text.difference is None:
        return None
    change = interval(text.difference.loss, text.difference.stderr, text.windows)
    if change is None or text.windows < MIN_WINDOWS:
        windows = f"{text.windows} window{'s' if text.windows != 1 else ''}"
        return Verdict("undecided", f"{windows} of text; measure {MIN_WINDOWS} or more")
    divergence, kl, flips = text.divergence, None, None
    if divergence is not None:
        kl = interval(divergence.mean, divergence.stderr, text.windows)
        flips = interval(1 - divergence.agreement, divergence.agreement_stderr, text.windows)
    if change.inside(LOSS_MARGIN) and kl and flips and kl.high < KL_MARGIN and flips.high < FLIPS_MARGIN:
        return Verdict("no visible loss")
    if change.low > 0:
        return Verdict("worse")
    if change.high < 0:
        return Verdict("better")
    if divergence is None or kl is None or flips is None:
        return Verdict("undecided", "the divergence was not measured; set top_k")
    if kl.low > KL_MARGIN or flips.low > FLIPS_MARGIN:
        return Verdict(
            "different predictions",
            f"KL divergence {divergence.mean:.2g} nats, {1 - divergence.agreement:.1%} of the predictions changed; for "
            "the loss, measure more windows",
        )
    return Verdict("undecided", "measure more windows")
