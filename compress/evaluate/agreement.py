"""Agreement with the base model, for models without a language-model head: they have no loss on a text.

Every window of the evaluation text is one input. What is compared depends on the kind of the model: embeddings by their
cosine and by the order of the similarities of all pairs of windows, classes and the two ends of a span by their
probabilities, scores by their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.checkpoint.sources.sentence import Pooling
from compress.data.ids import corpus_sha256
from compress.errors import NumericError
from compress.evaluate.base import EvaluationContext, Evaluator, Record, SummaryRow
from compress.evaluate.store import digest_of
from compress.models.kinds.kinds import DISTRIBUTIONS, HEADLESS, Compared, answer_of, kind_of
from compress.models.kinds.objective import without_cache
from compress.numerics.statistics import Estimate, jackknife, mean, ratio, spearman

LONGEST_SPAN = 30  # tokens of an answer at most, as usual for SQuAD (Devlin 2019, run_squad.py: max_answer_length)

Answer = list[Any]
"""What is kept of a model's answer to one window, as JSON."""

Pairs = Sequence[tuple[Tensor, Tensor]]
"""The answers of the base and of the compressed model to every window."""


class Measure(Record):
    """One measure of agreement, and its standard error with windows as the units of sampling."""

    value: float
    stderr: float | None = None


class TextAgreement(Record):
    """The agreement of two models on one text of [windows, length] token ids. sha256: of the ids.

    compared: what is compared. measures: by the keys of `MEASURE_WORDS`, the most important first.
    """

    text: str
    windows: int
    length: int
    sha256: str
    compared: Compared
    measures: dict[str, Measure]

    @property
    def main(self) -> tuple[MeasureWords, Measure]:
        """The most important measure and its words."""
        name, found = next(iter(self.measures.items()))
        return MEASURE_WORDS[name], found


@dataclass(frozen=True)
class MeasureWords:
    """A measure in words.

    name: in tables. sentence: with {} for the value. lost: the name of the distance from two equal models. exact: the
    value of two equal models. share: shown in percent.
    """

    name: str
    sentence: str
    lost: str = ""
    exact: float = 1.0
    share: bool = False

    @property
    def perfect(self) -> str:
        """The value of two equal models as text."""
        return f"{self.exact:.0%}" if self.share else f"{self.exact:g}"

    def value_text(self, found: Measure) -> str:
        """The value with its standard error, which has two significant digits where it is small."""
        form = ".1%" if self.share else f".{decimals(found.stderr)}f"
        return f"{found.value:{form}}" + ("" if found.stderr is None else f" ± {found.stderr:{form}}")


def decimals(stderr: float | None) -> int:
    """The decimals in which a standard error has two significant digits, from 4 to 7."""
    return 4 if not stderr else min(max(1 - math.floor(math.log10(stderr)), 4), 7)


MEASURE_WORDS = {
    "cosine": MeasureWords(
        "embeddings, cosine with the base model's", "the embeddings agree to {} (cosine)", "1 - cosine"
    ),
    "rank": MeasureWords(
        "similarities of pairs of texts, rank agreement", "the similarities of pairs of texts rank as before to {}"
    ),
    "same": MeasureWords(
        "same predicted class",
        "the predicted class is that of the base model in {} of the cases",
        "changed classes",
        share=True,
    ),
    "kl": MeasureWords("KL divergence of the probabilities, nats", "KL divergence {} nats", exact=0.0),
    "same_span": MeasureWords(
        "same answer span", "the answer span is that of the base model in {} of the texts", "changed spans", share=True
    ),
    "overlap": MeasureWords("overlap of the answer spans (F1)", "the answer spans overlap to {} (F1)", share=True),
    "score_rank": MeasureWords("scores, rank agreement", "the scores rank as before to {}", "1 - rank agreement"),
    "score_error": MeasureWords(
        "scores, difference relative to their spread", "the scores differ by {} of their spread", exact=0.0
    ),
}
"""The measures by key. Rank agreement is Spearman's correlation."""


class Agreement(Evaluator):
    """Agreement of both models on every text; None for a model with a language-model head."""

    needs_base: ClassVar[bool] = True
    result_type: ClassVar[Any] = list[TextAgreement]

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        """By text: its facts and the answer to each window. Raises NumericError for NaN."""
        kind, found = kind_of(model), {}
        if kind is None or kind not in HEADLESS:
            return None
        compared = kind.compared_in(model.config)
        for name, ids in context.texts.items():
            facts = {"windows": ids.shape[0], "length": ids.shape[1], "sha256": corpus_sha256(ids)}
            results = context.store.results(f"answers {digest_of(facts, compared, context.pooling)[:16]}")
            tell = context.progress(f"answers of {context.model} to {name}")

            def compute(missing: list[int], ids: Tensor = ids, results: Any = results, tell: Any = tell) -> None:
                for done, index in enumerate(missing, start=1):
                    results.put([(key(index), answer(model, ids[index], index, compared, context.pooling))])
                    tell(done, len(missing))

            found[name] = {**facts, "compared": compared, "answers": results.fill(range(len(ids)), key, compute)}
        return found

    def combine(self, compressed: dict[str, Any] | None, base: dict[str, Any] | None) -> list[dict[str, Any]] | None:
        """One `TextAgreement` per text, as JSON."""
        if compressed is None or base is None:
            return None
        return [
            {"text": name}
            | {key: value for key, value in found.items() if key != "answers"}
            | {"measures": measures(found["compared"], base[name]["answers"], found["answers"])}
            for name, found in compressed.items()
        ]

    def summary(self, result: Sequence[TextAgreement]) -> list[SummaryRow]:
        rows = []
        for text in result:
            shape = f"{text.text} ({text.windows} x {text.length} tokens)"
            for name, found in text.measures.items():
                words = MEASURE_WORDS[name]
                rows.append((f"{words.name}, {shape}", words.perfect, words.value_text(found), ""))
        return rows


def key(index: int) -> str:
    """The key of the answer to a window."""
    return f"window {index}"


@torch.no_grad()
def answer(
    model: nn.Module, ids: Int[Tensor, " length"], index: int, compared: Compared, pooling: Pooling = "mean"
) -> Answer:
    """What is compared of the answer to one window: an embedding, logits, or scores. Raises NumericError for NaN."""
    found = answer_of(model(input_ids=ids[None].to(next(model.parameters()).device), **without_cache(model)))
    assert found is not None  # a model is checked before it is used
    if not bool(found.isfinite().all()):
        raise NumericError(
            f"the model's output is NaN or infinite on window {index} of the evaluation text; evaluate it with --dtype "
            "float32, or write its checkpoint again"
        )
    logits = DISTRIBUTIONS[compared](found.float())
    if logits is not None:
        return logits[0].tolist()
    return (pooled(found[0].float(), pooling) if compared == "embeddings" else found[0].float().flatten()).tolist()


def pooled(states: Float[Tensor, "length width"], pooling: Pooling) -> Float[Tensor, " width"]:
    """The embedding of a text from the last hidden states of its tokens."""
    return {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]


def measures(compared: Compared, base: Sequence[Answer], compressed: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """The measures by key, as JSON; base, compressed: the answers to the same windows."""
    pairs = [(torch.tensor(one), torch.tensor(other)) for one, other in zip(base, compressed, strict=True)]
    found = {name: estimate for name, estimate in MEASURED[compared](pairs).items() if estimate is not None}
    return {name: Measure(value=each.value, stderr=each.stderr).model_dump() for name, each in found.items()}


def of_embeddings(pairs: Pairs) -> dict[str, Estimate | None]:
    """The mean cosine, and Spearman's correlation of the cosines of all pairs of windows in the two models."""
    cosines = [float(torch.cosine_similarity(one, other, dim=0, eps=1e-30)) for one, other in pairs]
    return {"cosine": mean(cosines), "rank": _ranked(similarities, pairs)}


def similarities(vectors: Float[Tensor, "windows width"]) -> Float[Tensor, " pairs"]:
    """The cosines of all pairs of embeddings."""
    unit = nn.functional.normalize(vectors, dim=-1)
    rows, columns = torch.triu_indices(len(unit), len(unit), offset=1)
    return (unit @ unit.T)[rows, columns]


def _ranked(values: Callable[[Tensor], Tensor], pairs: Pairs) -> Estimate | None:
    """Spearman's correlation of what `values` gives for all windows of each model; None where it is not defined."""

    def correlation(some: Pairs) -> float:
        both = [values(torch.stack(side)).tolist() for side in zip(*some, strict=True)]
        found = spearman(both[0], both[1])
        return float("nan") if found is None else found

    value = correlation(pairs)
    if value != value:
        return None
    error = jackknife(correlation, pairs) if len(pairs) > FEWEST else None
    return Estimate(value, None if error is None or error != error else error)


FEWEST = 4  # windows, of which the jackknife leaves at least 3 pairs


def of_classes(pairs: Pairs) -> dict[str, Estimate | None]:
    """The share of places with the same most likely class, and the mean KL divergence; logits: [places, classes]."""
    equal = [float((one.argmax(-1) == other.argmax(-1)).sum()) for one, other in pairs]
    counts = [float(len(one)) for one, _ in pairs]
    return {"same": ratio(equal, counts), "kl": ratio([_divergence(*pair) for pair in pairs], counts)}


def _divergence(base: Float[Tensor, "places cells"], other: Float[Tensor, "places cells"]) -> float:
    """The sum of the KL divergences of all places, in nats."""
    log_p, log_q = base.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum())


def of_spans(pairs: Pairs) -> dict[str, Estimate | None]:
    """The share of equal spans, their overlap, and the mean KL divergence of the two ends; logits: [2, length]."""
    spans = [(best_span(one), best_span(other)) for one, other in pairs]
    ends = [_divergence(*pair) for pair in pairs]
    return {
        "same_span": mean([float(one == other) for one, other in spans]),
        "overlap": mean([overlap(one, other) for one, other in spans]),
        "kl": ratio(ends, [2.0] * len(ends)),
    }


def best_span(logits: Float[Tensor, "2 length"]) -> tuple[int, int]:
    """The first and the last token of the most likely span of at most `LONGEST_SPAN` tokens."""
    start, end = logits
    spans = torch.ones(len(start), len(end), dtype=torch.bool).triu().tril(LONGEST_SPAN - 1)
    sums = (start[:, None] + end[None]).masked_fill(~spans, -torch.inf)
    return divmod(int(sums.argmax()), len(end))


def overlap(one: tuple[int, int], other: tuple[int, int]) -> float:
    """F1 of two spans: twice the tokens that they share over the sum of their lengths."""
    shared = max(0, min(one[1], other[1]) - max(one[0], other[0]) + 1)
    return 2 * shared / (one[1] - one[0] + other[1] - other[0] + 2)


def of_scores(pairs: Pairs) -> dict[str, Estimate | None]:
    """Spearman's correlation of the scores, and their root mean square difference over the base's spread."""

    def error(some: Pairs) -> float:
        base, other = (torch.cat(list(side)).double() for side in zip(*some, strict=True))
        spread = base.var(unbiased=False)
        return float(((other - base).square().mean() / spread).sqrt()) if float(spread) else float("nan")

    value = error(pairs)
    known = value == value and len(pairs) > FEWEST
    relative = Estimate(value, jackknife(error, pairs) if known else None) if value == value else None
    return {"score_rank": _ranked(torch.flatten, pairs), "score_error": relative}


MEASURED: Mapping[Compared, Callable[[Pairs], dict[str, Estimate | None]]] = {
    "embeddings": of_embeddings,
    "classes": of_classes,
    "labels": of_classes,
    "spans": of_spans,
    "score": of_scores,
}
"""The measures of what is compared."""
