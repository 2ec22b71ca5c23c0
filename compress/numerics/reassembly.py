"""Which input channels to split and to merge (QLLM, Liu 2023, section 4.1): distances, pairs and parts."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEIGHBOURS = 16  # nearest partners of a channel that are considered


def sub_channels(absmax: Float[Tensor, " in"], threshold: float) -> Int[Tensor, " in"]:
    """The number of sub-channels of each channel: T_i = ceil(max|X_i| / threshold), at least 1."""
    return torch.ceil(absmax / threshold).clamp(min=1).long()


def merging_errors(rows: Float[Tensor, "tokens in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "half half"]:
    """||(x_i - x_j) (w_i - w_j) / 2||_F^2 for even channels i and odd channels j: what merging them changes.

    w_i x_i + w_j x_j becomes (w_i + w_j) (x_i + x_j) / 2; the difference is (w_i - w_j) (x_i - x_j) / 2.
    """
    x, w = rows.T.double(), weight.T.double()
    return (torch.cdist(x[::2], x[1::2]) * torch.cdist(w[::2], w[1::2]) / 2).square()


def similar_pairs(
    errors: Float[Tensor, "half half"], spared: Bool[Tensor, " in"], count: int
) -> Int[Tensor, "pairs 2"] | None:
    """`count` pairs (even channel, odd channel) of the least error, each channel in one pair; None if there are fewer.

    Bipartite soft matching merges several even channels into one odd channel; here each channel is merged once.
    spared: channels that stay, because they are split.
    """
    allowed = errors.masked_fill(spared[::2, None] | spared[None, 1::2], torch.inf)
    near = min(NEIGHBOURS, allowed.shape[1])
    least, partner = allowed.topk(near, dim=1, largest=False)
    order = least.flatten().argsort(stable=True)
    found: list[tuple[int, int]] = []
    taken: set[int] = set()
    for at in order.tolist():
        even, odd = 2 * (at // near), 2 * int(partner.flatten()[at]) + 1
        if len(found) == count or torch.isinf(least.flatten()[at]):
            break
        if even not in taken and odd not in taken:
            found.append((even, odd))
            taken |= {even, odd}
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2) if len(found) == count else None
