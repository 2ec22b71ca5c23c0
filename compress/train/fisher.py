"""The diagonal of the empirical Fisher information of a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.errors import NumericError
from compress.train.objective import LanguageLoss
from compress.train.student import Student


def fisher(
    student: Student,
    objective: LanguageLoss,
    ids: Int[Tensor, "sequences length"],
    where: str,
    told: Callable[[int], None],
) -> dict[str, Float[Tensor, "out in"]]:
    """The mean over sequences of the squared gradient of each one's loss, by the full names of the linears.

    A gradient is squared and freed as soon as it is complete, so that only the squares of all weights are in memory.
    told: is called with the number of sequences that are done. Raises NumericError for a gradient that is not finite.
    """
    weights = student.parameters["weights"]
    found = {name: torch.zeros_like(weight, requires_grad=False) for name, weight in weights.items()}

    def take(name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        found[name].addcmul_(weight.grad, weight.grad, value=1 / len(ids))
        weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(partial(take, name)) for name, weight in weights.items()]
    try:
        for row in range(len(ids)):
            objective(student.model, ids[row : row + 1], [row]).backward()
            told(row + 1)
    finally:
        for hook in hooks:
            hook.remove()
    for name, squares in found.items():
        if not bool(squares.isfinite().all()):
            raise NumericError(f"{where}: the gradients of {name} are not finite; leave it out (ignore)")
    return {name.removesuffix(".weight"): squares for name, squares in found.items()}
