"""How far the next-token distributions of a student are from those of its teacher, and the gradient of that.

p is the teacher's distribution, q the student's, both at one temperature. A teacher may be known by its k likeliest
tokens and the mass of all others, which are then one cell of both distributions (joining cells makes no divergence of
this kind larger).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

DivergenceName = Literal["forward_kl", "reverse_kl", "js", "tv"]

CHUNK = 128  # tokens that a loss works on at once: its temporaries are a few times this many rows of the vocabulary


@dataclass(frozen=True, eq=False)
class SoftTargets:
    """What a teacher says of every token.

    log_probs: log p of all tokens of the vocabulary, or of those in `index`. index: the likeliest tokens, None: all, in
    order. log_rest: log of the mass of all others. text: log p, at temperature 1, of the token that comes next in the
    text, 0 where none does.
    """

    log_probs: Float[Tensor, "tokens cells"]
    index: Int[Tensor, "tokens cells"] | None = None
    log_rest: Float[Tensor, " tokens"] | None = None
    text: Float[Tensor, " tokens"] | None = None

    def part(self, at: slice) -> SoftTargets:
        """Some of the tokens."""
        index, rest = self.index, self.log_rest
        return SoftTargets(
            self.log_probs[at], None if index is None else index[at], None if rest is None else rest[at]
        )  # fmt: skip

    @property
    def cells(self) -> Float[Tensor, "tokens cells"]:
        """log p of every cell."""
        return self.log_probs if self.log_rest is None else torch.cat([self.log_probs, self.log_rest[:, None]], dim=1)


def soft_targets(logits: Float[Tensor, "tokens vocabulary"], temperature: float, top_k: int | None) -> SoftTargets:
    """softmax(logits / temperature), reduced to the `top_k` likeliest tokens and the rest."""
    scaled = logits.float() / temperature
    if top_k is None or top_k >= logits.shape[-1]:
        return SoftTargets(scaled.log_softmax(-1))
    index = scaled.topk(top_k, dim=-1).indices
    cells = _cells(scaled, index)
    return SoftTargets(cells[:, :-1], index.to(torch.int32), cells[:, -1])


def _cells(scaled: Float[Tensor, "tokens vocabulary"], index: Int[Tensor, "tokens k"]) -> Float[Tensor, "tokens cells"]:
    """log of the probabilities of the tokens in `index`, and of all others together."""
    whole = scaled.logsumexp(-1, keepdim=True)
    rest = scaled.scatter(-1, index.long(), -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([scaled.gather(-1, index.long()), rest], dim=1) - whole


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
"""(log p, log q), [tokens, cells] each -> [tokens]; the four of DistillSpec (Zhou 2023, arXiv 2310.08461)."""


def divergence(
    kind: DivergenceName, logits: Float[Tensor, "tokens vocabulary"], targets: SoftTargets, temperature: float
) -> Float[Tensor, " tokens"]:
    """The divergence of softmax(logits / temperature) from the targets, of every token."""
    scaled = logits.float() / temperature
    log_q = scaled.log_softmax(-1) if targets.index is None else _cells(scaled, targets.index)
    return DIVERGENCES[kind](targets.cells, log_q)


def token_weights(text: Float[Tensor, " tokens"], temperature: float) -> Float[Tensor, " tokens"]:
    """Weights of tokens that sum to 1: exp(c / temperature) for those that a teacher gives the cross-entropy c.

    What the teacher is sure of is learned soon, and would be fitted at the cost of the rest (TSLD, Kim 2023, arXiv
    2308.06744). text: as in `SoftTargets`; tokens that none follows have no weight.
    """
    return (-text / temperature).masked_fill(text == 0, -math.inf).softmax(0)


class _Mean(torch.autograd.Function):
    """The weighted mean of a loss per token; gradients are made chunk by chunk, and nothing else is kept of the size
    of the logits.
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
        found, ctx.gradient = ctx.gradient, None
        return found.mul_(gradients[0].to(found.dtype)), None, None


def distillation_loss(
    kind: DivergenceName,
    logits: Float[Tensor, "tokens vocabulary"],
    targets: SoftTargets,
    temperature: float = 1.0,
    weights: Float[Tensor, " tokens"] | None = None,
    chunk: int = CHUNK,
) -> Float[Tensor, ""]:
    """temperature^2 times the mean divergence over tokens; weights: of the tokens, summing to 1.

    The square keeps the size of the gradient about the same at every temperature (Hinton 2015, section 2).
    """
    count = len(logits)

    def loss(part: Tensor, at: slice) -> Tensor:
        each = divergence(kind, part, targets.part(at), temperature)
        share = each / count if weights is None else each * weights[at]
        return temperature**2 * share.sum()

    return _Mean.apply(logits, loss, chunk)  # type: ignore[return-value,arg-type]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||, in float32; 0 for two zeros."""
    difference = torch.linalg.vector_norm(found.float() - wanted.float())
    size = torch.linalg.vector_norm(wanted.float())
    return float(difference / size) if float(size) > 0 else float(difference)
