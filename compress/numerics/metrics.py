"""Divergences between the next-token distributions of a student and its teacher, and their gradients.

p is the teacher's distribution and q the student's, both at one temperature. A teacher may be known only by its k most
likely tokens and the total probability of all others. The others are then one cell of both distributions; merging
cells never increases a divergence of this kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.histogram import BINS, SAMPLE, Histogram

DivergenceName = Literal["forward_kl", "reverse_kl", "js", "tv"]

CHUNK = 2**22
"""Logits in a chunk of a loss, whose temporaries have a few times this size: 16 MB in float32.

glibc maps blocks of more than 32 MB anew in every call, and the kernel zeroes their pages each time.
"""


def rows_of_chunk(vocabulary: int) -> int:
    """Return the number of tokens in a chunk."""
    return max(1, CHUNK // vocabulary)


@dataclass(frozen=True, eq=False)
class SoftTargets:
    """The teacher's distribution for each token.

    Attributes:
        log_probs: log p of all tokens of the vocabulary, or of the tokens in `index`.
        index: the most likely tokens; None: all tokens, in order.
        log_rest: log of the total probability of all other tokens.
        text: log p, at temperature 1, of the next token of the text; infinite if there is no next token.
    """

    log_probs: Float[Tensor, "tokens cells"]
    index: Int[Tensor, "tokens cells"] | None = None
    log_rest: Float[Tensor, " tokens"] | None = None
    text: Float[Tensor, " tokens"] | None = None

    def part(self, tokens: slice) -> SoftTargets:
        """Return the targets of a slice of the tokens."""
        index, log_rest = self.index, self.log_rest
        return SoftTargets(
            self.log_probs[tokens],
            None if index is None else index[tokens],
            None if log_rest is None else log_rest[tokens],
        )

    @property
    def cells(self) -> Float[Tensor, "tokens cells"]:
        """log p of every cell."""
        return self.log_probs if self.log_rest is None else torch.cat([self.log_probs, self.log_rest[:, None]], dim=1)


def soft_targets(logits: Float[Tensor, "tokens vocabulary"], temperature: float, top_k: int | None) -> SoftTargets:
    """Return softmax(logits / temperature), reduced to the `top_k` most likely tokens and one cell for all others."""
    scaled = logits.float() / temperature
    if top_k is None or top_k >= logits.shape[-1]:
        return SoftTargets(scaled.log_softmax(-1))
    index = scaled.topk(top_k, dim=-1).indices
    cells = _cells(scaled, index)
    return SoftTargets(cells[:, :-1], index.to(torch.int32), cells[:, -1])


def _cells(scaled: Float[Tensor, "tokens vocabulary"], index: Int[Tensor, "tokens k"]) -> Float[Tensor, "tokens cells"]:
    """Return log probabilities of the tokens in `index`, then of all other tokens together."""
    index = index.long()
    log_rest = scaled.scatter(-1, index, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([scaled.gather(-1, index), log_rest], dim=1).log_softmax(-1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum p (log p - log q), over cells with p > 0."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0).sum(-1)


def _js(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2


def _tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum |p - q| / 2."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


DIVERGENCES: dict[DivergenceName, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": _kl,
    "reverse_kl": lambda log_p, log_q: _kl(log_q, log_p),
    "js": _js,
    "tv": _tv,
}
"""Functions (log p, log q), [tokens, cells] each -> [tokens]: the four of DistillSpec (Zhou 2023, arXiv 2310.08461)."""


def divergence(
    kind: DivergenceName, logits: Float[Tensor, "tokens vocabulary"], targets: SoftTargets, temperature: float
) -> Float[Tensor, " tokens"]:
    """Return the divergence of softmax(logits / temperature) from the targets, per token."""
    scaled = logits.float() / temperature
    log_q = scaled.log_softmax(-1) if targets.index is None else _cells(scaled, targets.index)
    return DIVERGENCES[kind](targets.cells, log_q)


def token_weights(
    text: Float[Tensor, " tokens"], temperature: float, lengths: Sequence[int] | None = None
) -> Float[Tensor, " tokens"]:
    """Return token weights that sum to 1, proportional to exp(c / temperature) in each sequence.

    c is the teacher's cross-entropy. A token that the teacher predicts with confidence is learned early and is
    overfitted at the cost of the others (TSLD, Kim 2023, arXiv 2308.06744). Every sequence has the same weight, as in
    the authors' code.

    Args:
        text: as in `SoftTargets`; tokens without a next token have weight 0.
        temperature: of the weights.
        lengths: tokens of each sequence; None for one sequence.
    """
    sequences = (-text / temperature).split(lengths or [len(text)])
    return torch.cat([sequence.softmax(0) for sequence in sequences]) / len(sequences)


class _Mean(torch.autograd.Function):
    """The weighted mean of a loss per token, computed in chunks.

    The forward pass computes the gradient of each chunk. The only tensor of the size of the logits is that gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Callable[[Tensor, slice], Tensor], chunk: int) -> Tensor:
        needed = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits) if needed else None
        total = torch.zeros((), device=logits.device)
        for start in range(0, len(logits), chunk):
            at = slice(start, start + chunk)
            part = logits[at].detach().requires_grad_(needed)
            with torch.set_grad_enabled(needed):
                value = loss(part, at)
            if gradient is not None:
                gradient[at] = torch.autograd.grad(value, part)[0]
            total += value.detach()
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(gradients[0].to(gradient.dtype)), None, None


def distillation_loss(
    kind: DivergenceName,
    logits: Float[Tensor, "tokens vocabulary"],
    targets: SoftTargets,
    temperature: float = 1.0,
    weights: Float[Tensor, " tokens"] | None = None,
    chunk: int | None = None,
) -> Float[Tensor, ""]:
    """Return temperature^2 times the weighted mean of the divergence over tokens.

    The factor temperature^2 keeps the magnitude of the gradient about the same at every temperature (Hinton 2015,
    section 2).

    Args:
        kind: the divergence.
        logits: of the student.
        targets: of the teacher.
        temperature: of both distributions.
        weights: weights of the tokens, which sum to 1; None: uniform.
        chunk: tokens that are computed at once; None: `rows_of_chunk`.
    """
    count = len(logits)

    def loss(part: Tensor, at: slice) -> Tensor:
        values = divergence(kind, part, targets.part(at), temperature)
        weighted = values / count if weights is None else values * weights[at]
        return temperature**2 * weighted.sum()

    return _Mean.apply(logits, loss, chunk or rows_of_chunk(logits.shape[-1]))  # type: ignore[return-value,arg-type]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected|| in float32; 0 if both are zero."""
    difference = torch.linalg.vector_norm(actual.float() - expected.float())
    size = torch.linalg.vector_norm(expected.float())
    return float(difference / size) if float(size) > 0 else float(difference)


def histogram(original: Tensor, changed: Tensor) -> Histogram | None:
    """Count at most `SAMPLE` values of each tensor; return None if a value is not finite."""
    sizes = [
        float(torch.stack(values.aminmax()).abs().max()) for values in (original, changed)
    ]  # abs() copies a tensor
    if not all(map(math.isfinite, sizes)):
        return None
    limit = max(sizes) or 1.0
    return Histogram(limit, _counts(original, limit), _counts(changed, limit))


def _counts(values: Tensor, limit: float) -> list[int]:
    flat = values.reshape(-1)
    sample = flat[:: -(-flat.numel() // SAMPLE)].float()
    return [int(count) for count in torch.histc(sample, BINS, -limit, limit).tolist()]
