"""Matrices drawn at random, and what an observer sees of them, shared by the tests."""

import torch

from compress.passes.contract.observers import Gram


def random(*shape, seed=0):
    """Standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(tokens=200, width=40, seed=0):
    """Inputs [tokens, width] that share a common part, channels of very different size in no order."""
    size = torch.linspace(0.2, 3, width)[torch.randperm(width, generator=torch.Generator().manual_seed(seed))]
    return (random(tokens, width, seed=seed) + 2 * random(tokens, 1, seed=seed + 1)) * size


def seen_of(rows, kind=Gram):
    """What an observer gathers from inputs [tokens, width]."""
    seen = kind(rows.shape[1], torch.device("cpu"))
    seen.update(rows)
    return seen
