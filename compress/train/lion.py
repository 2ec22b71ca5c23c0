"""The Lion optimizer: steps of constant size along the sign of an interpolated momentum (Chen 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, https://arxiv.org/abs/2302.06675, with one float of state per weight.

    c = b1 m + (1 - b1) g;  W = W - rate (sign(c) + weight_decay W);  m = b2 m + (1 - b2) g. m is stored as `exp_avg`.
    The steps are larger than AdamW's: the paper recommends a rate 3 to 10 times smaller and a decay larger by the same.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(groups, {"lr": 1e-4, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "exp_avg" not in state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                    _move(parameter, parameter.grad, state["exp_avg"], group)
        return loss


def _move(weight: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
    """Update one parameter and its momentum in place."""
    beta1, beta2 = group["betas"]
    direction = momentum.lerp(gradient, 1 - beta1).sign_()
    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
    momentum.lerp_(gradient, 1 - beta2)
