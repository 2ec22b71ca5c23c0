"""Rewrite weights in place: rows and columns of linears, dense or compressed, and the weights of norms and routers."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from compress.layers.base import InputTransform
from compress.layers.linear import LINEARS, CompressedLinear

Rewrite = Callable[[Tensor], Tensor]


def remember(*modules: nn.Module) -> Callable[[], None]:
    """Return a function that restores the weights, masks and biases of these modules; tensors are not copied."""
    states = [(m, dict(m._parameters), dict(m._buffers), dict(m._modules)) for m in modules]
    facts = [(m, m.sparsity) for m in modules if isinstance(m, CompressedLinear)]

    def undo() -> None:
        for module, parameters, buffers, children in states:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
            module._modules.update(children)
        for module, sparsity in facts:
            module.sparsity = sparsity

    return undo


def rewrite_weight(module: nn.Module, change: Rewrite) -> None:
    """Replace the matrix [out, in] of a linear or a router by change(matrix); a mask is changed in the same way."""
    if isinstance(module, CompressedLinear):
        mask = None if module.mask is None else change(module.mask.float()) != 0
        module.put(change(module.weight), mask)
        return
    transposed = isinstance(module, LINEARS) and CompressedLinear.of(module).transposed
    weight = module.get_parameter("weight").detach()
    new = change(weight.T).T if transposed else change(weight)
    module.weight = nn.Parameter(new.contiguous(), requires_grad=False)


def rewrite_rows(module: nn.Module, change: Rewrite) -> None:
    """Replace the matrix of a linear by change(matrix) and its bias [out] by change(bias)."""
    rewrite_weight(module, change)
    bias = module._parameters.get("bias")
    if bias is not None:
        module.bias = nn.Parameter(change(bias.detach()).contiguous(), requires_grad=False)


def rotate_inputs(layer: CompressedLinear, rotation: InputTransform) -> None:
    """Fold the inverse of an orthogonal transform into the dense weight and apply it to inputs: (x R) (W R)^T = x W^T.

    Transforms that the layer has are folded into the weight first.
    """
    assert not layer.quantized, "codes cannot be rotated; passes that rotate come before quantizing passes"
    assert layer.positions is None, "a rotation would lose the zeros of pruned weights"
    layer.absorb_inputs()
    weight = layer.weight
    layer.put(rotation(weight.float()).to(weight.dtype))
    layer.set_transform(rotation)


def divide_norm(norm: nn.Module, divisor: Float[Tensor, " channels"], form: str) -> None:
    """Divide the output of a norm by `divisor`.

    Args:
        norm: module with a one-dimensional weight.
        divisor: one per channel.
        form: how the norm uses its weight, 'weight' or '1 + weight'.
    """
    weight = norm.get_parameter("weight").detach()
    factor = divisor.to(weight)
    new = weight / factor if form == "weight" else (1 + weight) / factor - 1
    norm.weight = nn.Parameter(new, requires_grad=False)
    bias = norm._parameters.get("bias")
    if bias is not None:
        norm.bias = nn.Parameter(bias.detach() / factor, requires_grad=False)
