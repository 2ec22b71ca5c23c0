"""Compare variants of one model: a table, and the Pareto plot of size against loss as an SVG or in a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from compress.evaluate.agreement import TextAgreement
from compress.evaluate.base import Record
from compress.report.evaluation import Evaluation, plus_minus
from compress.report.page.blocks import Items, Prose, Table
from compress.report.page.charts import Point, Scatter
from compress.report.page.numbers import upper_first
from compress.report.page.render import Part, page
from compress.report.verdict import agreements, of_loss
from compress.report.write import FILE, ReportError, read_report

HEAD = ("model", "MB", "smaller", "loss - base", "KL", "top-1", "tasks, mean difference", "front")
MB = 1e6
LOSS = "loss - base"
WIDE, TALL, EDGE, FOOT = 640, 400, 70, 48  # pixels of the picture, and of its margins on the left and below


class Variant(Record):
    """One model of a comparison. size_bytes: of its weight files. loss: the paired difference from the base in nats.

    measure: what `loss` is; of models without a language-model head, the distance from two equal models.
    kl, agreement: the divergence from the base. tasks: the mean over tasks of the accuracy difference. text: the name
    and the digest of the text, which must be equal for all.
    """

    source: str
    size_bytes: int
    base_bytes: int
    text: str
    loss: float
    loss_stderr: float | None = None
    measure: str = LOSS
    kl: float | None = None
    kl_stderr: float | None = None
    agreement: float | None = None
    tasks: float | None = None


def from_report(folder: Path) -> Variant:
    """The variant that a run wrote, from its report.json. Raises ReportError."""
    path, report = folder / FILE, read_report(folder)
    sizes = report.size.checkpoint_bytes, report.size.dense_bytes
    if compared := agreements(report):
        return _of_agreement(str(folder), sizes, compared[0])
    texts = report.evaluations.get("perplexity") or []
    if not texts or texts[0].difference is None:
        raise ReportError(f"{path}: has no paired loss on a text; run compress compare --measure")
    text, found = texts[0], texts[0].divergence
    return Variant(
        source=str(folder),
        size_bytes=sizes[0],
        base_bytes=sizes[1],
        text=f"{text.text}, {text.windows} x {text.length} tokens, sha256 {text.sha256[:12]}",
        loss=text.difference.loss,
        loss_stderr=text.difference.stderr,
        kl=None if found is None else found.mean,
        kl_stderr=None if found is None else found.stderr,
        agreement=None if found is None else found.agreement,
        tasks=_mean_of_tasks(report.evaluations.get("tasks")),
    )


def _of_agreement(source: str, sizes: tuple[int, int], text: TextAgreement) -> Variant:
    """The variant of a model that is compared by its answers. sizes: bytes of its weights, and of the base's."""
    (words, found), kl = text.main, text.measures.get("kl")
    return Variant(
        source=source,
        size_bytes=sizes[0],
        base_bytes=sizes[1],
        text=f"{text.text}, {text.windows} x {text.length} tokens, sha256 {text.sha256[:12]}",
        loss=words.exact - found.value,
        loss_stderr=found.stderr,
        measure=words.lost,
        kl=None if kl is None else kl.value,
        kl_stderr=None if kl is None else kl.stderr,
    )


def from_reports(folders: Sequence[Path]) -> list[Variant]:
    """The variants of some runs. Raises ReportError when they were measured on different texts or models."""
    found = [from_report(folder) for folder in folders]
    for other in found[1:]:
        for name in ("text", "base_bytes", "measure"):
            if getattr(other, name) != getattr(found[0], name):
                raise ReportError(
                    f"{other.source}: its {name.replace('_', ' ')} is {getattr(other, name)}, but that of "
                    f"{found[0].source} is {getattr(found[0], name)}; run compress compare --measure --base MODEL"
                )
    return found


def from_evaluation(found: Evaluation) -> list[Variant]:
    """The variants of an evaluation against its base, which is not among them. Raises ReportError without a text."""
    sizes = {model.source: model.size_bytes for model in found.models}
    variants = []
    for model in found.models:
        if model.source == found.base:
            continue
        if found.base is not None and (compared := model.compared.get("agreement")):
            both = model.size_bytes, sizes[found.base]
            variants.append(_of_agreement(model.source, both, compared[0]))
            continue
        if found.base is None or not model.texts or model.texts[0].difference is None:
            raise ReportError(f"{model.source}: was not compared with a base on a text; give --base and a --text")
        text, kl = model.texts[0], model.texts[0].divergence
        variants.append(
            Variant(
                source=model.source,
                size_bytes=model.size_bytes,
                base_bytes=sizes[found.base],
                text=f"{text.text}, {text.windows} x {text.length} tokens, sha256 {text.sha256[:12]}",
                loss=0.0 if text.difference is None else text.difference.loss,
                loss_stderr=None if text.difference is None else text.difference.stderr,
                kl=None if kl is None else kl.mean,
                kl_stderr=None if kl is None else kl.stderr,
                agreement=None if kl is None else kl.agreement,
                tasks=_mean_of_tasks(model.compared.get("tasks")),
            )
        )
    return variants


def _mean_of_tasks(result: object) -> float | None:
    """The mean accuracy difference over the tasks; of each task, its first metric that is right or wrong."""
    first: dict[str, float] = {}
    for row in getattr(result, "scores", ()):
        if row.paired is not None and row.paired.p is not None:
            first.setdefault(row.task, row.paired.difference)
    return sum(first.values()) / len(first) if first else None


def front(variants: Sequence[Variant]) -> list[bool]:
    """Whether no other variant is as small with less loss, or smaller with as little loss."""

    def beats(one: Variant, other: Variant) -> bool:
        no_worse = one.size_bytes <= other.size_bytes and one.loss <= other.loss
        return no_worse and (one.size_bytes < other.size_bytes or one.loss < other.loss)

    return [not any(beats(other, one) for other in variants) for one in variants]


def rows(variants: Sequence[Variant]) -> list[tuple[str, ...]]:
    """Rows of `HEAD`, from the largest model to the smallest."""
    best = dict(zip((one.source for one in variants), front(variants), strict=True))
    return [
        (
            one.source,
            f"{one.size_bytes / MB:.1f}",
            f"{one.base_bytes / one.size_bytes:.2f}x",
            plus_minus(one.loss, one.loss_stderr, "+.4f"),
            "" if one.kl is None else plus_minus(one.kl, one.kl_stderr, ".4f"),
            "" if one.agreement is None else f"{one.agreement:.1%}",
            "" if one.tasks is None else f"{one.tasks:+.4f}",
            "yes" if best[one.source] else "",
        )
        for one in sorted(variants, key=lambda one: -one.size_bytes)
    ]


def head(variants: Sequence[Variant]) -> tuple[str, ...]:
    """`HEAD` with the name of what is measured."""
    return tuple(variants[0].measure if name == LOSS else name for name in HEAD)


def verdict(one: Variant) -> str:
    """A variant in words: its size, its loss, and whether the loss is more than chance."""
    if one.measure != LOSS:
        distance = plus_minus(one.loss, one.loss_stderr, ".4f")
        return f"{one.base_bytes / one.size_bytes:.2f}x smaller; {one.measure} {distance}"
    return of_loss(one.base_bytes / one.size_bytes, one.loss, one.loss_stderr)


def picture(variants: Sequence[Variant]) -> str:
    """The loss of each variant over its size, with standard errors; a line joins the Pareto front."""
    best = front(variants)
    errors = [one.loss_stderr or 0.0 for one in variants]
    right = 1.1 * max(one.size_bytes for one in variants) / MB
    low = min(0.0, *(one.loss - e for one, e in zip(variants, errors, strict=True)))
    high = max(one.loss + e for one, e in zip(variants, errors, strict=True))
    span = (high - low) * 1.1 or 1.0

    def place(size: float, loss: float) -> tuple[float, float]:
        return EDGE + (WIDE - EDGE - 20) * size / right, 20 + (TALL - FOOT - 20) * (1 - (loss - low) / span)

    ordered = sorted((one for one, on in zip(variants, best, strict=True) if on), key=lambda one: one.size_bytes)
    line = " ".join("{:.1f},{:.1f}".format(*place(one.size_bytes / MB, one.loss)) for one in ordered)
    parts = [f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-dasharray="4 3"/>']
    for one, on, error in zip(variants, best, errors, strict=True):
        x, y = place(one.size_bytes / MB, one.loss)
        _, top = place(0, one.loss + error)
        _, bottom = place(0, one.loss - error)
        color = "#1f77b4" if on else "#888"
        parts.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{color}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
        side = 'text-anchor="end"' if x > WIDE * 0.7 else ""
        shift = -8 if side else 8
        parts.append(f'<text x="{x + shift:.1f}" y="{y - 6:.1f}" {side}>{escape(Path(one.source).name)}</text>')
    return _frame(parts, right, low, low + span, f"{axis(variants)}, on {variants[0].text}")


def html(variants: Sequence[Variant]) -> str:
    """The comparison as an HTML page: the Pareto plot, the verdicts and the table."""
    best, per_token = front(variants), " per token" if variants[0].measure == LOSS else ""
    points = [_point(one, on) for one, on in zip(variants, best, strict=True)]
    plot = Scatter(points, "size of the checkpoint in MB", upper_first(axis(variants)) + per_token)
    sentences = Items([f"{one.source}: {verdict(one)}" for one in variants])
    text = f"Measured on {variants[0].text}. Bars are one standard error; the line joins the Pareto front."
    parts = [
        Part("plot", "", [Prose(text), plot]),
        Part("verdicts", "Verdicts", [sentences]),
        Part("table", "Table", [Table(*_measured(head(variants), rows(variants)))]),
    ]
    return page(f"{len(variants)} variants of one model", "compress compare", parts)


def axis(variants: Sequence[Variant]) -> str:
    """The name of the axis of the loss."""
    return "loss minus that of the base model, in nats" if variants[0].measure == LOSS else variants[0].measure


def _measured(names: Sequence[str], found: Sequence[tuple[str, ...]]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows without the columns that are empty."""
    kept = [i for i in range(len(names)) if any(row[i] for row in found)]
    return [names[i] for i in kept], [[row[i] for i in kept] for row in found]


def _point(one: Variant, on_front: bool) -> Point:
    text = f"{one.source}: {verdict(one)}"
    return Point(Path(one.source).name, one.size_bytes / MB, one.loss, one.loss_stderr or 0.0, text, on_front)


def _frame(parts: Sequence[str], right: float, low: float, high: float, text: str) -> str:
    """The picture with its axes."""
    base = TALL - FOOT
    labels = [
        f'<text x="{EDGE}" y="{base + 18}">0</text>',
        f'<text x="{WIDE - 20}" y="{base + 18}" text-anchor="end">{right:.0f} MB</text>',
        f'<text x="{EDGE - 6}" y="28" text-anchor="end">{high:+.3f}</text>',
        f'<text x="{EDGE - 6}" y="{base}" text-anchor="end">{low:+.3f}</text>',
        f'<text x="{EDGE}" y="{base + 38}">{escape(text)}</text>',
    ]
    axes = f'<path d="M{EDGE} 20V{base}H{WIDE - 20}" fill="none" stroke="#444"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {TALL}" width="{WIDE}" height="{TALL}"'
    body = f'<rect width="100%" height="100%" fill="white"/>{axes}{"".join(labels)}{"".join(parts)}'
    return f'{head} font-family="sans-serif" font-size="12">{body}</svg>\n'
