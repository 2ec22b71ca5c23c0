"""Divergence from the base model: KL and top-1 agreement, with stored tokens of the base.

The base model runs once. For each target its `top_k` most likely tokens are stored with their log-probabilities, and
`SAMPLES` tokens that are drawn from its distribution over all others, in 16 bits. The KL divergence of a variant is

    sum over the top k of p (log p - log q)  +  p(rest) * mean over the samples of (log p - log q),

an unbiased estimate of the KL over the whole vocabulary, in nats. (The k + 1 outcomes "top k, or any other" alone give
a lower bound that is far too low: with k = 128, 79% of the KL of SmolLM2-135M rounded to int4.) Drawing adds to each
target an error of p(rest) * std(log p - log q) / sqrt(SAMPLES), which the mean over thousands of targets removes and
the standard error contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint.containers.files import atomic
from compress.numerics.statistics import mean, quantile, ratio
from compress.results.measurements.perplexity import AtPositions, Divergence

SHORT_IDS = 1 << 16  # vocabularies up to this size keep token ids in 16 bits
SAMPLES = 32  # tokens drawn from the tail of each distribution
LEAST = torch.finfo(torch.float16).min


class SampledDistribution(NamedTuple):
    """Most likely and sampled tokens of the base model's distribution at some targets.

    Attributes:
        ids: The most likely tokens, in descending order.
        logs: Their log-probabilities.
        rest: Log-probability of all other tokens together.
        drawn: Tokens drawn from these others.
        drawn_logs: Their log-probabilities.
    """

    ids: Int[Tensor, "targets k"]
    logs: Float[Tensor, "targets k"]
    rest: Float[Tensor, " targets"]
    drawn: Int[Tensor, "targets samples"]
    drawn_logs: Float[Tensor, "targets samples"]

    @classmethod
    def of(cls, logits: Float[Tensor, "targets vocabulary"], top_k: int, seed: int = 0) -> SampledDistribution:
        """Select the tokens of a distribution; log-probabilities are rounded to 16 bits.

        Args:
            logits: Of the base model.
            top_k: Number of most likely tokens.
            seed: Of the sampling.
        """
        log_probabilities = logits.float().log_softmax(-1)
        logs, ids = log_probabilities.topk(min(top_k, log_probabilities.shape[1]), dim=-1)
        rest_logs = rest_of(log_probabilities, ids).clamp(min=LEAST)
        chances = log_probabilities.exp().scatter(-1, ids, 0.0)
        chances[chances.sum(-1) == 0] = 1.0  # nothing is left; what is drawn has the weight p(rest) = 0
        generator = torch.Generator(device=log_probabilities.device).manual_seed(seed)
        drawn = chances.multinomial(SAMPLES, replacement=True, generator=generator)
        return cls(
            ids, logs.half(), rest_logs.half(), drawn, log_probabilities.gather(-1, drawn).clamp(min=LEAST).half()
        )

    @classmethod
    def in_chunks(cls, logits: Float[Tensor, "targets vocabulary"], top_k: int, rows: int) -> SampledDistribution:
        """Select tokens as `of`, some rows at a time.

        Results go to tensors that hold all rows. Small tensors that stay, between large ones that are freed, would
        keep the allocator from using this memory again: twice that of the logits.
        """
        result: SampledDistribution | None = None
        for i, part in enumerate(logits.split(rows)):
            chunk = cls.of(part, top_k, seed=i)
            result = result or cls(*(tensor.new_empty(len(logits), *tensor.shape[1:]) for tensor in chunk))
            for to, tensor in zip(result, chunk, strict=True):
                to[i * rows : i * rows + len(part)] = tensor
        assert result is not None
        return result

    def save(self, path: Path) -> None:
        """Write a file atomically."""
        short = bool((self.ids < SHORT_IDS).all()) and bool((self.drawn < SHORT_IDS).all())
        kind = torch.int16 if short else torch.int32
        tensors = {
            name: tensor if tensor.is_floating_point() else tensor.to(torch.int32).to(kind)
            for name, tensor in self._asdict().items()
        }
        with atomic(path) as part:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, part)

    @classmethod
    def load(cls, path: Path) -> SampledDistribution:
        """Read a file of `save`."""
        tensors = load_file(path)
        for name in ("ids", "drawn"):
            short = tensors[name].dtype == torch.int16
            tensors[name] = tensors[name].long() & (SHORT_IDS - 1) if short else tensors[name].long()
        return cls(**tensors)

    def divergence(self, logits: Float[Tensor, "targets vocabulary"]) -> tuple[Float[Tensor, " targets"], Tensor]:
        """Estimate the KL divergence of another model's logits, and return whether the most likely tokens agree."""
        log_probabilities = logits.float().log_softmax(-1)
        stored = SampledDistribution(*(tensor.to(log_probabilities.device) for tensor in self))
        base = torch.cat([stored.logs, stored.rest[:, None]], -1).double()
        base = base - base.logsumexp(-1, keepdim=True)  # rounding to 16 bits changed the sum
        top_logs = log_probabilities.gather(-1, stored.ids).double().clamp(min=LEAST)
        top_divergence = (base[:, :-1].exp() * (base[:, :-1] - top_logs)).sum(-1)
        drawn_logs = log_probabilities.gather(-1, stored.drawn).double().clamp(min=LEAST)
        rest_divergence = base[:, -1].exp() * (stored.drawn_logs.double() - drawn_logs).mean(-1)
        return top_divergence + rest_divergence, log_probabilities.argmax(-1) == stored.ids[:, 0]


def rest_of(
    log_probabilities: Float[Tensor, "targets vocabulary"], ids: Int[Tensor, "targets k"]
) -> Float[Tensor, " targets"]:
    """Compute the log-probability of all tokens except `ids`; -inf if there is none."""
    return log_probabilities.scatter(-1, ids, -torch.inf).logsumexp(-1)


def summarized(windows: Sequence[tuple[list[float], list[int], list[int]]], top_k: int) -> Divergence:
    """Summarize windows; each has lists of KL, agreement as 0 or 1, and position of its targets."""
    values = [value for kl, _, _ in windows for value in kl]
    counts = [len(kl) for kl, _, _ in windows]
    kl = ratio([sum(kl) for kl, _, _ in windows], counts)
    agreement = ratio([sum(same) for _, same, _ in windows], counts)
    return Divergence(
        mean=kl.value,
        stderr=kl.stderr,
        median=quantile(values, 0.5),
        p99=quantile(values, 0.99),
        agreement=agreement.value,
        agreement_stderr=agreement.stderr,
        top_k=top_k,
        by_position=_by_position(windows),
    )


def _by_position(windows: Sequence[tuple[list[float], list[int], list[int]]]) -> list[AtPositions]:
    """Means over positions 1, 2-3, 4-7, ...: the context doubles from one row to the next."""
    rows: dict[int, tuple[list[float], list[int]]] = {}
    for kl, equals_of_window, positions in windows:
        for value, equal, position in zip(kl, equals_of_window, positions, strict=True):
            values, equals = rows.setdefault(max(position, 1).bit_length(), ([], []))
            values.append(value)
            equals.append(equal)
    return [
        AtPositions(
            first=1 << (bits - 1), last=(1 << bits) - 1, kl=mean(values).value, agreement=sum(equals) / len(equals)
        )
        for bits, (values, equals) in sorted(rows.items())
    ]
