"""Limits of quality that end a run with an error, for pipelines that must not ship a model that is too bad."""

from __future__ import annotations

from compress.errors import QualityError
from compress.recipe.evaluation import QualityLimits
from compress.results.comparison import Comparison
from compress.results.measurements.tasks import TasksResult
from compress.results.result import Measurements


def check_models(comparison: Comparison) -> None:
    """Check all measured models but the base against `fail_if` of the settings.

    Raises:
        QualityError: for the first model that exceeds a limit.
    """
    for model in comparison.models:
        limits = comparison.settings.fail_if if model.source != comparison.base else None
        if (error := quality_error(limits, model, model.source)) is not None:
            raise error


def quality_error(limits: QualityLimits | None, measured: Measurements, name: str) -> QualityError | None:
    """Return the error that lists the limits that a model exceeds; None if there is none.

    A limit whose quantity was not measured counts as exceeded.

    Args:
        limits: the limits; None if there are none.
        measured: the measurements.
        name: the model, for the message.
    """
    exceeded = [] if limits is None else exceeded_limits(limits, measured)
    return QualityError(f"{name}: {'; '.join(exceeded)}") if exceeded else None


def exceeded_limits(limits: QualityLimits, measured: Measurements) -> list[str]:
    """Describe each limit that is exceeded, such as 'KL divergence 0.3120 on wikitext is above fail_if kl: 0.2'."""
    losses = {text.text: text.difference.loss for text in measured.texts if text.difference is not None}
    divergences = {text.text: text.divergence.mean for text in measured.texts if text.divergence is not None}
    divergences |= {text.text: text.measures["kl"].value for text in measured.agreements if "kl" in text.measures}
    tasks: TasksResult | None = measured.evaluations.get("tasks")
    drops: dict[str, float] = {}
    for row in () if tasks is None else tasks.scores:
        drop = row.base - row.compressed
        drops[f"{row.task} {row.metric}"] = drop if row.higher_is_better else -drop
    checks = (
        ("kl", limits.kl, "KL divergence", divergences),
        ("loss", limits.loss, "loss difference", losses),
        ("task_drop", limits.task_drop, "drop", drops),
    )
    exceeded = []
    for key, limit, quantity, values in checks:
        if limit is not None and not values:
            exceeded.append(f"fail_if {key}: {limit:g} cannot be checked, because nothing was measured for it")
        elif limit is not None:
            above = {place: value for place, value in values.items() if not value <= limit}  # NaN is above
            exceeded += [
                f"{quantity} {v:.4f} on {place} is above fail_if {key}: {limit:g}" for place, v in above.items()
            ]
    return exceeded
