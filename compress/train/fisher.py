"""The diagonal of the empirical Fisher information of a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from compress.errors import NumericError
from compress.models.kinds.batch import Examples
from compress.train.objective import LanguageLoss
from compress.train.student import Student


def fisher(
    student: Student,
    objective: LanguageLoss,
    examples: Examples,
    label: str,
    report_progress: Callable[[int], None],
) -> dict[str, Float[Tensor, "out in"]]:
    """Compute the mean over sequences of the squared gradient of each sequence's loss.

    A gradient is squared and freed as soon as it is complete, so that memory holds only the squares of all weights.

    Args:
        student: student whose weights are trained.
        objective: loss of a sequence.
        examples: the sequences.
        label: prefix of error messages.
        report_progress: called with the number of completed sequences.

    Returns:
        The squares by full name of the linear.

    Raises:
        NumericError: for a gradient that is not finite.
    """
    weights = student.parameters["weights"]
    squares_by_name = {name: torch.zeros_like(weight, requires_grad=False) for name, weight in weights.items()}

    def accumulate(name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        squares_by_name[name].addcmul_(weight.grad, weight.grad, value=1 / len(examples))
        weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(partial(accumulate, name)) for name, weight in weights.items()]
    try:
        for row in range(len(examples)):
            objective(student.model, examples[row : row + 1], [row]).backward()
            report_progress(row + 1)
    finally:
        for hook in hooks:
            hook.remove()
    for name, squares in squares_by_name.items():
        if not bool(squares.isfinite().all()):
            raise NumericError(f"{label}: the gradients of {name} are not finite; leave it out (ignore)")
    return {name.removesuffix(".weight"): squares for name, squares in squares_by_name.items()}
