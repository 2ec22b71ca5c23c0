"""Cayley SGD: gradient descent with momentum on orthogonal matrices (Li 2020), which learns rotations (SpinQuant)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from compress.numerics.rotation import cayley_step


class CayleySGD(torch.optim.Optimizer):
    """Algorithm 1 of https://arxiv.org/abs/2002.01113 for square orthogonal matrices; `cayley_step` is one step.

    Every parameter stays orthogonal. With momentum there is one float of state per number, stored as `exp_avg`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float = 0.0) -> None:
        super().__init__(groups, {"lr": 1.5, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in (candidate for candidate in group["params"] if candidate.grad is not None):
                state = self.state[parameter]
                updated, momentum = cayley_step(
                    parameter, parameter.grad, state.get("exp_avg"), group["lr"], group["momentum"]
                )
                parameter.copy_(updated)
                if group["momentum"]:
                    state["exp_avg"] = momentum
        return loss
