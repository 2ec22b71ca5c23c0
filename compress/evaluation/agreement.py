"""Agreement with the base model, for models without a language-model head: they have no loss on a text.

Every window of the evaluation text is one input. What is compared depends on the kind of the model: embeddings by their
cosine and by the order of the similarities of all pairs of windows, classes and the two ends of a span by their
probabilities, scores by their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import NumericError
from compress.evaluation.base import EvaluationContext, Evaluator
from compress.evaluation.store import digest_of
from compress.models.forward import device_of_model
from compress.models.kinds.batch import Batch, Examples
from compress.models.kinds.contract import DISTRIBUTIONS, required_answer, run_on
from compress.models.kinds.kinds import kind_of
from compress.models.terms import Compared, Pooling
from compress.numerics.statistics import Estimate, jackknife, mean, ratio, spearman
from compress.results.measurements.agreement import Measure

LONGEST_SPAN = 30  # tokens of an answer at most, as usual for SQuAD (Devlin 2019, run_squad.py: max_answer_length)

Answer = list[Any]
"""What is kept of a model's answer to one window, as JSON."""

Pairs = Sequence[tuple[Tensor, Tensor]]
"""The answers of the base and of the compressed model to every window."""


class Agreement(Evaluator):
    """Agreement of both models on every text; None for a model with a language-model head."""

    needs_base: ClassVar[bool] = True

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        """Compute, for each text, the answer to each window.

        Raises:
            NumericError: for an output that is NaN or infinite.
        """
        kind, texts = kind_of(model), {}
        if kind is None or kind.learns:
            return None
        compared = kind.compared_in(model.config)
        for name, examples in context.texts.items():
            facts = {"windows": len(examples), "length": examples.length, "sha256": examples.sha256()}
            results = context.store.results(f"answers {digest_of(facts, compared, context.pooling)[:16]}")
            report_progress = context.progress(f"answers of {context.model} to {name}")

            def compute(
                missing: list[int],
                examples: Examples = examples,
                results: Any = results,
                report_progress: Any = report_progress,
            ) -> None:
                for count, index in enumerate(missing, start=1):
                    results.put([(key(index), answer(model, examples[index], index, compared, context.pooling))])
                    report_progress(count, len(missing))

            answers = results.fill(range(len(examples)), key, compute)
            texts[name] = {**facts, "compared": compared, "answers": answers, "overlap": context.overlaps.get(name)}
        return texts

    def combine(self, compressed: dict[str, Any] | None, base: dict[str, Any] | None) -> list[dict[str, Any]] | None:
        """Return one `TextAgreement` per text, as JSON."""
        if compressed is None or base is None:
            return None
        return [
            {"text": name}
            | {key: value for key, value in measured.items() if key != "answers"}
            | {"measures": measures(measured["compared"], base[name]["answers"], measured["answers"])}
            for name, measured in compressed.items()
        ]


def key(index: int) -> str:
    """Return the key of the answer to a window."""
    return f"window {index}"


@torch.no_grad()
def answer(model: nn.Module, window: Batch, index: int, compared: Compared, pooling: Pooling = "mean") -> Answer:
    """Compute what is compared of the answer to one window: an embedding, logits, or scores.

    Raises:
        NumericError: for an output that is NaN or infinite.
    """
    output = required_answer(run_on(model, window.to(device_of_model(model))))
    if not bool(output.isfinite().all()):
        raise NumericError(
            f"the model's output is NaN or infinite on window {index} of the evaluation text; evaluate it with dtype "
            "float32, or write its checkpoint again"
        )
    logits = DISTRIBUTIONS[compared](output.float())
    if logits is not None:
        return logits[0].tolist()
    return (pooled(output[0].float(), pooling) if compared == "embeddings" else output[0].float().flatten()).tolist()


def pooled(states: Float[Tensor, "length width"], pooling: Pooling) -> Float[Tensor, " width"]:
    """Compute the embedding of a text from the last hidden states of its tokens."""
    return {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]


def measures(compared: Compared, base: Sequence[Answer], compressed: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Compute the measures by key, as JSON, from the answers of both models to the same windows."""
    pairs = [
        (torch.tensor(base_answer), torch.tensor(compressed_answer))
        for base_answer, compressed_answer in zip(base, compressed, strict=True)
    ]
    estimates = {name: estimate for name, estimate in MEASURED[compared](pairs).items() if estimate is not None}
    return {
        name: Measure(value=estimate.value, stderr=estimate.stderr).model_dump() for name, estimate in estimates.items()
    }


def of_embeddings(pairs: Pairs) -> dict[str, Estimate | None]:
    """Compute the mean cosine, and Spearman's correlation of the cosines of all pairs of windows in the two models."""
    cosines = [float(torch.cosine_similarity(a, b, dim=0, eps=1e-30)) for a, b in pairs]
    return {"cosine": mean(cosines), "rank": _ranked(similarities, pairs)}


def similarities(vectors: Float[Tensor, "windows width"]) -> Float[Tensor, " pairs"]:
    """Compute the cosines of all pairs of embeddings."""
    unit = nn.functional.normalize(vectors, dim=-1)
    rows, columns = torch.triu_indices(len(unit), len(unit), offset=1)
    return (unit @ unit.T)[rows, columns]


def _ranked(values: Callable[[Tensor], Tensor], pairs: Pairs) -> Estimate | None:
    """Spearman's correlation of what `values` returns for all windows of each model; None if it is not defined."""

    def correlation(subset: Pairs) -> float:
        values_of_models = [values(torch.stack(side)).tolist() for side in zip(*subset, strict=True)]
        coefficient = spearman(values_of_models[0], values_of_models[1])
        return float("nan") if coefficient is None else coefficient

    value = correlation(pairs)
    if value != value:
        return None
    error = jackknife(correlation, pairs) if len(pairs) > FEWEST else None
    return Estimate(value, None if error is None or error != error else error)


FEWEST = 4  # windows, of which the jackknife leaves at least 3 pairs


def of_classes(pairs: Pairs) -> dict[str, Estimate | None]:
    """Compute the fraction of places with the same most likely class, and the mean KL divergence.

    Logits are [places, classes].
    """
    equal = [float((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs]
    counts = [float(len(a)) for a, _ in pairs]
    return {"same": ratio(equal, counts), "kl": ratio([_divergence(*pair) for pair in pairs], counts)}


def _divergence(base: Float[Tensor, "places cells"], compressed: Float[Tensor, "places cells"]) -> float:
    """The sum of the KL divergences of all places, in nats."""
    log_p, log_q = base.double().log_softmax(-1), compressed.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum())


def of_spans(pairs: Pairs) -> dict[str, Estimate | None]:
    """Compute the fraction of equal spans, their overlap, and the mean KL divergence of start and end.

    Logits are [2, length].
    """
    spans = [(best_span(a), best_span(b)) for a, b in pairs]
    ends = [_divergence(*pair) for pair in pairs]
    return {
        "same_span": mean([float(a == b) for a, b in spans]),
        "overlap": mean([overlap(a, b) for a, b in spans]),
        "kl": ratio(ends, [2.0] * len(ends)),
    }


def best_span(logits: Float[Tensor, "2 length"]) -> tuple[int, int]:
    """Find the first and the last token of the most likely span of at most `LONGEST_SPAN` tokens."""
    start, end = logits
    spans = torch.ones(len(start), len(end), dtype=torch.bool).triu().tril(LONGEST_SPAN - 1)
    sums = (start[:, None] + end[None]).masked_fill(~spans, -torch.inf)
    return divmod(int(sums.argmax()), len(end))


def overlap(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Compute F1 of two spans: twice the number of shared tokens over the sum of their lengths."""
    shared = max(0, min(a[1], b[1]) - max(a[0], b[0]) + 1)
    return 2 * shared / (a[1] - a[0] + b[1] - b[0] + 2)


def of_scores(pairs: Pairs) -> dict[str, Estimate | None]:
    """Compute Spearman's correlation of the scores, and their root mean square difference over the base's spread."""

    def error(subset: Pairs) -> float:
        base, compressed = (torch.cat(list(side)).double() for side in zip(*subset, strict=True))
        spread = base.var(unbiased=False)
        return float(((compressed - base).square().mean() / spread).sqrt()) if float(spread) else float("nan")

    value = error(pairs)
    has_error = value == value and len(pairs) > FEWEST
    relative = Estimate(value, jackknife(error, pairs) if has_error else None) if value == value else None
    return {"score_rank": _ranked(torch.flatten, pairs), "score_error": relative}


MEASURED: Mapping[Compared, Callable[[Pairs], dict[str, Estimate | None]]] = {
    "embeddings": of_embeddings,
    "classes": of_classes,
    "labels": of_classes,
    "spans": of_spans,
    "score": of_scores,
}
"""The function that computes the measures of what is compared."""
