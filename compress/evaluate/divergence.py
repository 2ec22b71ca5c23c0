"""Divergence from the base model: KL and top-1 agreement, against the base's kept most likely tokens.

The base model runs once. For each target its `top_k` largest log-probabilities, their token ids and the probability of
all other tokens are kept in 16 bits. A variant is compared on these k + 1 outcomes: the k tokens, and the rest as one.
This gives a lower bound of the KL divergence over the whole vocabulary (the log sum inequality), in nats. What is lost
is tail mass times the divergence within the tail: at most 1% of the KL on the models of `eval/README.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.evaluate.base import Record
from compress.formats.containers.files import atomic
from compress.numerics.statistics import mean, quantile, ratio

SHORT_IDS = 1 << 16  # vocabularies up to this size keep token ids in 16 bits
LEAST = torch.finfo(torch.float16).min


class Kept(NamedTuple):
    """What is kept of the base model for some targets.

    ids: the most likely tokens, in descending order. logs: their log-probabilities. rest: the log-probability of all
    other tokens.
    """

    ids: Int[Tensor, "targets k"]
    logs: Float[Tensor, "targets k"]
    rest: Float[Tensor, " targets"]

    @classmethod
    def of(cls, logits: Float[Tensor, "targets vocabulary"], top_k: int) -> Kept:
        """Choose the most likely tokens; logs are rounded to 16 bits."""
        every = logits.float().log_softmax(-1)
        logs, ids = every.topk(min(top_k, every.shape[1]), dim=-1)
        return cls(ids, logs.half(), rest_of(every, ids).clamp(min=LEAST).half())

    def save(self, path: Path) -> None:
        """Write a file atomically."""
        short = bool((self.ids < SHORT_IDS).all())
        ids = self.ids.to(torch.int32)
        with atomic(path) as part:
            tensors = {"ids": ids.to(torch.int16) if short else ids, "logs": self.logs, "rest": self.rest}
            save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, part)

    @classmethod
    def load(cls, path: Path) -> Kept:
        """Read a file of `save`."""
        found = load_file(path)
        ids = found["ids"].long()
        return cls(ids & (SHORT_IDS - 1) if found["ids"].dtype == torch.int16 else ids, found["logs"], found["rest"])

    def divergence(self, logits: Float[Tensor, "targets vocabulary"]) -> tuple[Float[Tensor, " targets"], Tensor]:
        """The KL divergence of another model's logits on the kept outcomes, and whether the first tokens agree."""
        every = logits.float().log_softmax(-1)
        ids = self.ids.to(every.device)
        base = torch.cat([self.logs, self.rest[:, None]], -1).double().to(every.device)
        base = base - base.logsumexp(-1, keepdim=True)  # rounding to 16 bits changed the sum
        other = torch.cat([every.gather(-1, ids), rest_of(every, ids)[:, None]], -1).double()
        other = (other - other.logsumexp(-1, keepdim=True)).clamp(min=LEAST)
        return (base.exp() * (base - other)).sum(-1), every.argmax(-1) == ids[:, 0]


def rest_of(every: Float[Tensor, "targets vocabulary"], ids: Int[Tensor, "targets k"]) -> Float[Tensor, " targets"]:
    """The log-probability of all tokens but some; -inf where none is left."""
    return every.scatter(-1, ids, -torch.inf).logsumexp(-1)


class AtPositions(Record):
    """Means over the targets at some positions of their windows, from `first` to `last`."""

    first: int
    last: int
    kl: float
    agreement: float


class Divergence(Record):
    """The divergence of a variant from its base on one text, in nats per target.

    mean, stderr: with windows as the units of sampling. median, p99: quantiles over all targets. agreement: the share
    of targets where both models have the same most likely token. top_k: the tokens that were kept of the base.
    """

    mean: float
    stderr: float | None
    median: float
    p99: float
    agreement: float
    agreement_stderr: float | None
    top_k: int
    by_position: list[AtPositions]


def summarized(windows: Sequence[tuple[list[float], list[int], list[int]]], top_k: int) -> Divergence:
    """Summarize windows of (KL, agreement as 0 or 1, position) of each target."""
    every = [value for kl, _, _ in windows for value in kl]
    counts = [len(kl) for kl, _, _ in windows]
    found = ratio([sum(kl) for kl, _, _ in windows], counts)
    agreement = ratio([sum(same) for _, same, _ in windows], counts)
    return Divergence(
        mean=found.value,
        stderr=found.stderr,
        median=quantile(every, 0.5),
        p99=quantile(every, 0.99),
        agreement=agreement.value,
        agreement_stderr=agreement.stderr,
        top_k=top_k,
        by_position=_by_position(windows),
    )


def _by_position(windows: Sequence[tuple[list[float], list[int], list[int]]]) -> list[AtPositions]:
    """Means over positions 1, 2-3, 4-7, ...: the context doubles from one row to the next."""
    rows: dict[int, tuple[list[float], list[int]]] = {}
    for kl, same, positions in windows:
        for value, equal, position in zip(kl, same, positions, strict=True):
            values, equals = rows.setdefault(max(position, 1).bit_length(), ([], []))
            values.append(value)
            equals.append(equal)
    return [
        AtPositions(
            first=1 << (bits - 1), last=(1 << bits) - 1, kl=mean(values).value, agreement=sum(equals) / len(equals)
        )
        for bits, (values, equals) in sorted(rows.items())
    ]
