"""Second derivatives of a model's predictions by the weights of its linears, estimated by sampling.

Both functions differentiate the negative log-likelihood of labels that are sampled from the model's own predictions.
The expectation of its second derivatives is the Fisher information, which is the curvature of the KL divergence from
the model. No labels are needed, so this works for all kinds of models.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from compress.errors import NumericError, TargetError
from compress.layers.linear import CompressedLinear, shape_of
from compress.models.forward import device_of_model
from compress.models.kinds.batch import Batch
from compress.models.kinds.contract import DISTRIBUTIONS, required_answer, run_on
from compress.models.kinds.kinds import kind_of
from compress.models.structure.blocks import find_blocks, hidden_argument

ProgressReport = Callable[[int], None]
"""Called with the number of completed sequences."""


def label_generator(row: Batch, seed: int) -> torch.Generator:
    """Return the generator of the sampled labels of a sequence; it does not depend on the process or the order."""
    return torch.Generator().manual_seed(zlib.crc32(row.content(), seed))


def sampled_nll(model: nn.Module, row: Batch, draw: torch.Generator) -> tuple[Tensor, int]:
    """Compute the negative log-likelihood of labels that are sampled from the model's own predictions.

    Scores and embeddings, which are not distributions, are treated as means of normal distributions of variance 1.

    Args:
        model: the model.
        row: one sequence.
        draw: generator of the labels.

    Returns:
        The sum over all positions, and the number of positions.

    Raises:
        NumericError: for predictions that are not finite.
    """
    answer = required_answer(run_on(model, row.to(device_of_model(model))))
    if not bool(answer.detach().isfinite().all()):
        raise NumericError("the model's predictions hold NaN or infinity on the calibration text")
    kind = kind_of(model)
    logits = None if kind is None else DISTRIBUTIONS[kind.compared_in(getattr(model, "config", None))](answer)
    if logits is None:
        noise = torch.randn(answer.shape, generator=draw).to(answer.device)
        return (answer.float() - answer.detach().float() - noise).square().sum() / 2, answer.shape[0] * answer.shape[1]
    logits = logits.float().flatten(0, 1)
    labels = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=draw)[:, 0].to(logits.device)
    return nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels)


def weight_curvature(
    model: nn.Module,
    names: Sequence[str],
    rows: Sequence[Batch],
    seed: int,
    report_progress: ProgressReport,
) -> tuple[dict[str, Float[Tensor, "out in"]], int]:
    """Compute the diagonal of the Fisher information of the weight of every linear, summed over all tokens.

    This is the sum over tokens of g_o^2 x_i^2, with g the derivatives of the negative log-likelihood by the outputs and
    x the inputs. Products of different tokens are omitted. A mean of g_o^2 times a mean of x_i^2 is inaccurate if
    tokens with large derivatives have small inputs, such as attention sinks. Memory holds one float per weight and the
    activations of one sequence.

    Args:
        model: the model.
        names: names of the linears.
        rows: each sequence.
        seed: seed of the sampled labels.
        report_progress: called with the number of completed sequences.

    Returns:
        The diagonals by name (zeros for a linear that no token reaches), and the number of positions.

    Raises:
        NumericError: for derivatives that are not finite.
    """
    modules = {name: model.get_submodule(name) for name in names}
    fisher_diagonals = {
        name: torch.zeros(shape_of(module), device=device_of_model(model)) for name, module in modules.items()
    }
    token_count = 0

    def create_hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            inputs = arguments[0].detach()
            if isinstance(module, CompressedLinear):
                inputs = module.transform(inputs)

            def accumulate(gradient: Tensor) -> None:
                squares = (t.float().square().flatten(0, -2) for t in (gradient, inputs))
                fisher_diagonals[name].addmm_(next(squares).T, next(squares))

            if output.requires_grad:
                output.register_hook(accumulate)

        return hook

    with ExitStack() as stack, torch.enable_grad():
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(create_hook(name)).remove)
        stack.enter_context(_differentiate_from_embedding(model))
        for count_done, row in enumerate(rows, start=1):
            loss, count = sampled_nll(model, row, label_generator(row, seed))
            loss.backward()
            token_count += count
            report_progress(count_done)
    for name, squares in fisher_diagonals.items():
        if not bool(squares.isfinite().all()):
            raise NumericError(f"{name}: the derivatives of the model by its outputs are not finite")
    return fisher_diagonals, token_count


@contextmanager
def _differentiate_from_embedding(model: nn.Module) -> Iterator[None]:
    """Start derivatives at the output of the input embedding, so that no parameter requires a gradient.

    Those of a stack of blocks that reads recordings start at its input.
    """

    def begin(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_argument(args, kwargs)
        if not hidden.requires_grad:
            hidden.requires_grad_()

    embedding = model.get_input_embeddings()  # type: ignore[operator]
    first_blocks = {block.stack: block.module for block in reversed(find_blocks(model))}
    with ExitStack() as stack:
        stack.callback(
            embedding.register_forward_hook(lambda module, arguments, output: output.requires_grad_()).remove
        )
        for block in first_blocks.values():
            stack.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
        yield


def hessian_traces(
    model: nn.Module,
    names: Sequence[str],
    rows: Sequence[Batch],
    probes: int,
    seed: int,
    report_progress: ProgressReport,
) -> tuple[dict[str, float], int]:
    """Estimate the traces of the Hessian of the negative log-likelihood by the weight of every linear.

    Hutchinson's estimate is the mean of v^T H v over random signs v, with one product with the Hessian for all layers
    (HAWQ-V2, Dong 2020, arXiv 1911.03852). Memory holds weights, derivatives and v of all layers.

    Args:
        model: the model.
        names: names of the linears.
        rows: each sequence.
        probes: number of random sign vectors per sequence.
        seed: seed of the sampled labels and the signs.
        report_progress: called with the number of completed sequences.

    Returns:
        The traces by name, summed over the sequences, and the number of positions.

    Raises:
        TargetError: for a linear without a dense weight.
        NumericError: for a trace that is not finite.
    """
    weights = {name: getattr(model.get_submodule(name), "weight", None) for name in names}
    for name, weight in weights.items():
        if not isinstance(weight, nn.Parameter):
            raise TargetError(f"{name}: is compressed already, so it has no weight with a Hessian; write by: kl")
    parameters = [weight for weight in weights.values() if weight is not None]
    requires_grad_flags = [weight.requires_grad for weight in parameters]
    totals, token_count = [0.0] * len(parameters), 0
    try:
        for weight in parameters:
            weight.requires_grad_()
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivatives
            for count_done, row in enumerate(rows, start=1):
                draw = label_generator(row, seed)
                loss, count = sampled_nll(model, row, draw)
                token_count += count
                gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
                for _ in range(probes):
                    signs = [_signs(weight, draw) for weight in parameters]
                    products = torch.autograd.grad(
                        gradients, parameters, signs, retain_graph=True, materialize_grads=True
                    )
                    for i, (sign, product) in enumerate(zip(signs, products, strict=True)):
                        totals[i] += float((sign * product).sum(dtype=torch.float64)) / probes
                report_progress(count_done)
    finally:
        for weight, requires_grad in zip(parameters, requires_grad_flags, strict=True):
            weight.requires_grad_(requires_grad)
    trace_by_name = dict(zip(weights, totals, strict=True))
    for name, trace in trace_by_name.items():
        if not math.isfinite(trace):
            raise NumericError(f"{name}: the trace of its Hessian is not finite")
    return trace_by_name, token_count


def _signs(weight: Tensor, draw: torch.Generator) -> Tensor:
    """Draw random signs of the shape of a weight."""
    return (torch.randint(0, 2, weight.shape, generator=draw) * 2 - 1).to(weight)
