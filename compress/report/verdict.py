"""The verdict in words: how much smaller a model is, and whether its loss is more than chance."""

from __future__ import annotations

from compress.report.schema import Report

DECIDED = 2  # standard errors from which a difference counts as decided
SIGNIFICANT = 0.05  # p-value below which the flips of a task count as more than chance


def of_loss(smaller: float, loss: float, stderr: float | None) -> str:
    """A size ratio and a paired loss difference in nats, in words."""
    size = f"{smaller:.2f}x smaller"
    if stderr is None:
        return f"{size}; loss {loss:+.4f} nats, of unknown error: measure more than one window"
    change = f"{loss:+.4f} ± {stderr:.4f}"
    worse = "worse" if loss > 0 else "better"
    decided = abs(loss) > DECIDED * stderr
    return f"{size}; loss {change} nats: " + (f"{worse}, not by chance" if decided else "no decided difference")


def of_report(report: Report) -> list[str]:
    """The verdict of a run: a sentence for size and loss, for the divergence, and for the tasks."""
    size = report.size
    smaller = size.dense_bytes / size.checkpoint_bytes
    texts = [text for text in report.evaluations.get("perplexity") or [] if text.difference is not None]
    if not texts:
        return [f"{smaller:.2f}x smaller; the quality was not measured (eval: null)"]
    found = [f"{of_loss(smaller, text.difference.loss, text.difference.stderr)} on {text.text}" for text in texts]
    found += [
        f"the most likely token is that of the base model at {text.divergence.agreement:.1%} of the positions of "
        f"{text.text}, KL divergence {text.divergence.mean:.4f} nats"
        for text in texts
        if text.divergence is not None
    ]
    tasks = report.evaluations.get("tasks")
    rows = [row for row in tasks.scores if row.paired is not None and row.paired.p is not None] if tasks else []
    if rows:
        other = [row for row in rows if row.paired.p < SIGNIFICANT]
        names = ", ".join(f"{row.task} {row.metric} ({row.paired.difference:+.3f})" for row in other)
        found.append(
            f"{len(other)} of {len(rows)} task metrics differ by more than chance (p < {SIGNIFICANT})"
            + (f": {names}" if other else "")
        )
    return found
