"""Which input channels to split and to merge (QLLM, Liu 2023, section 4.1): distances, pairs and parts."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEIGHBOURS = 16  # nearest partners of a channel that are considered


def sub_channels(absmax: Float[Tensor, " in"], threshold: float) -> Int[Tensor, " in"]:
    """Return the number of sub-channels of each channel: T_i = ceil(max|X_i| / threshold), at least 1."""
    return torch.ceil(absmax / threshold).clamp(min=1).long()


def merging_errors(rows: Float[Tensor, "tokens in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "half half"]:
    """Return ||(x_i - x_j) (w_i - w_j) / 2||_F^2, the error of merging even channels i with odd channels j.

    w_i x_i + w_j x_j becomes (w_i + w_j) (x_i + x_j) / 2; the difference is (w_i - w_j) (x_i - x_j) / 2.
    """
    x, w = rows.T.double(), weight.T.double()
    return (torch.cdist(x[::2], x[1::2]) * torch.cdist(w[::2], w[1::2]) / 2).square()


def similar_pairs(
    errors: Float[Tensor, "half half"], excluded: Bool[Tensor, " in"], count: int
) -> Int[Tensor, "pairs 2"] | None:
    """Choose pairs (even channel, odd channel) of the least error, each channel in at most one pair.

    Bipartite soft matching merges several even channels into one odd channel; here each channel is merged once.

    Args:
        errors: `merging_errors`.
        excluded: True for channels that may not be merged, because they are split.
        count: number of pairs.

    Returns:
        The pairs; None if there are fewer than `count`.
    """
    allowed = errors.masked_fill(excluded[::2, None] | excluded[None, 1::2], torch.inf)
    neighbours = min(NEIGHBOURS, allowed.shape[1])
    errors_of_nearest, partner = allowed.topk(neighbours, dim=1, largest=False)
    order = errors_of_nearest.flatten().argsort(stable=True)
    pairs: list[tuple[int, int]] = []
    paired_channels: set[int] = set()
    for index in order.tolist():
        even, odd = 2 * (index // neighbours), 2 * int(partner.flatten()[index]) + 1
        if len(pairs) == count or torch.isinf(errors_of_nearest.flatten()[index]):
            break
        if even not in paired_channels and odd not in paired_channels:
            pairs.append((even, odd))
            paired_channels |= {even, odd}
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2) if len(pairs) == count else None
