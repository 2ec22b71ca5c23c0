"""How much a model's predictions change with the weights of its linears: second derivatives, by sampling.

Both functions differentiate the surprise of a model at answers that are drawn from its own predictions. The expectation
of its second derivatives is the Fisher information, the curvature of the KL divergence from the model. No labels are
needed, so all kinds of models have one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from compress.errors import NumericError, TargetError
from compress.layers.linear import CompressedLinear, shape_of
from compress.models.kinds.kinds import DISTRIBUTIONS, answer_of, kind_of
from compress.models.kinds.objective import run_on
from compress.models.structure.blocks import find_blocks, hidden_argument

Told = Callable[[int], None]
"""Called with the number of sequences that are done."""


def draws(row: Int[Tensor, "1 length"], seed: int) -> torch.Generator:
    """The generator of the draws for a sequence; the same in whichever process and order it is computed."""
    return torch.Generator().manual_seed(zlib.crc32(row.cpu().numpy().tobytes(), seed))


def surprise(model: nn.Module, ids: Int[Tensor, "1 length"], draw: torch.Generator) -> tuple[Tensor, int]:
    """-log p of one answer per place, drawn from the model's own distributions p, summed; and the number of places.

    Scores and embeddings, which are no distributions, count as means of normal ones of variance 1.
    """
    answer = answer_of(run_on(model, ids.to(next(model.parameters()).device)))
    assert answer is not None  # a model is checked before it is used
    if not bool(answer.detach().isfinite().all()):
        raise NumericError("the model's predictions hold NaN or infinity on the calibration text")
    kind = kind_of(model)
    logits = None if kind is None else DISTRIBUTIONS[kind.compared_in(getattr(model, "config", None))](answer)
    if logits is None:
        noise = torch.randn(answer.shape, generator=draw).to(answer.device)
        return (answer.float() - answer.detach().float() - noise).square().sum() / 2, answer.shape[0] * answer.shape[1]
    logits = logits.float().flatten(0, 1)
    drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=draw)[:, 0].to(logits.device)
    return nn.functional.cross_entropy(logits, drawn, reduction="sum"), len(drawn)


def weight_curvature(
    model: nn.Module, names: Sequence[str], rows: Sequence[Int[Tensor, "1 length"]], seed: int, told: Told
) -> tuple[dict[str, Float[Tensor, "out in"]], int]:
    """The diagonal of the Fisher information of the weight of every linear, summed over all tokens; and the places.

    That is the sum over tokens of g_o^2 x_i^2, g the derivatives of the surprise by the outputs, x the inputs: products
    of different tokens are left out. A mean of g_o^2 times a mean of x_i^2 is far off where tokens with large
    derivatives have small inputs, as attention sinks do. names: of the linears; zeros for those that no token reaches.
    In memory are one float per weight and the activations of one sequence.

    Raises NumericError for derivatives that are not finite.
    """
    modules = {name: model.get_submodule(name) for name in names}
    found = {
        name: torch.zeros(shape_of(module), device=next(model.parameters()).device) for name, module in modules.items()
    }
    places = 0

    def watched(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            inputs = given[0].detach()
            if isinstance(module, CompressedLinear):
                inputs = module.transform(inputs)

            def take(gradient: Tensor) -> None:
                squares = (t.float().square().flatten(0, -2) for t in (gradient, inputs))
                found[name].addmm_(next(squares).T, next(squares))

            if output.requires_grad:
                output.register_hook(take)

        return hook

    with ExitStack() as stack, torch.enable_grad():
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(watched(name)).remove)
        stack.enter_context(_from_the_inputs(model))
        for done, row in enumerate(rows, start=1):
            loss, count = surprise(model, row, draws(row, seed))
            loss.backward()
            places += count
            told(done)
    for name, squares in found.items():
        if not bool(squares.isfinite().all()):
            raise NumericError(f"{name}: the derivatives of the model by its outputs are not finite")
    return found, places


@contextmanager
def _from_the_inputs(model: nn.Module) -> Iterator[None]:
    """Derivatives start at the output of the input embedding, so that no parameter needs one.

    Those of a stack of blocks that reads recordings start at its input.
    """

    def begin(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_argument(args, kwargs)
        if not hidden.requires_grad:
            hidden.requires_grad_()

    embedding = model.get_input_embeddings()  # type: ignore[operator]
    first = {block.stack: block.module for block in reversed(find_blocks(model))}
    with ExitStack() as stack:
        stack.callback(embedding.register_forward_hook(lambda module, given, output: output.requires_grad_()).remove)
        for block in first.values():
            stack.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
        yield


def hessian_traces(
    model: nn.Module, names: Sequence[str], rows: Sequence[Int[Tensor, "1 length"]], probes: int, seed: int, told: Told
) -> tuple[dict[str, float], int]:
    """The traces of the Hessian of the surprise by the weight of every linear, summed over the sequences; the places.

    Hutchinson's estimate: the mean of v^T H v over random signs v, one product with the Hessian for all layers each
    (HAWQ-V2, Dong 2020, arXiv 1911.03852). Weights, derivatives and v of all layers are in memory.

    Raises TargetError for a linear without a dense weight, NumericError for a trace that is not finite.
    """
    weights = {name: getattr(model.get_submodule(name), "weight", None) for name in names}
    for name, weight in weights.items():
        if not isinstance(weight, nn.Parameter):
            raise TargetError(f"{name}: is compressed already, so it has no weight with a Hessian; write by: kl")
    parameters = [weight for weight in weights.values() if weight is not None]
    asked = [weight.requires_grad for weight in parameters]
    totals, places = [0.0] * len(parameters), 0
    try:
        for weight in parameters:
            weight.requires_grad_()
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivatives
            for done, row in enumerate(rows, start=1):
                draw = draws(row, seed)
                loss, count = surprise(model, row, draw)
                places += count
                first = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
                for _ in range(probes):
                    signs = [_signs(weight, draw) for weight in parameters]
                    products = torch.autograd.grad(first, parameters, signs, retain_graph=True, materialize_grads=True)
                    for i, (sign, product) in enumerate(zip(signs, products, strict=True)):
                        totals[i] += float((sign * product).sum(dtype=torch.float64)) / probes
                told(done)
    finally:
        for weight, before in zip(parameters, asked, strict=True):
            weight.requires_grad_(before)
    found = dict(zip(weights, totals, strict=True))
    for name, trace in found.items():
        if not math.isfinite(trace):
            raise NumericError(f"{name}: the trace of its Hessian is not finite")
    return found, places


def _signs(weight: Tensor, draw: torch.Generator) -> Tensor:
    """Random signs of the shape of a weight."""
    return (torch.randint(0, 2, weight.shape, generator=draw) * 2 - 1).to(weight)
