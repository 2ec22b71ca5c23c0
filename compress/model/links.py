"""Structure discovery: what one real forward pass of a block says about it. No names of architectures, no tracing.

Groups: linears whose input is the same tensor share it; a module with a one-dimensional weight whose output is that
tensor is the norm where a scale per channel can be folded. Every fold is proved in numbers before it is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.model.packed import CompressedLinear, linears

FOLD_TOLERANCE = 1e-4  # relative, float32: measured folds are exact to 1e-6, wrong ones are off by more than 1e-2

Forward = Callable[[nn.Module], Tensor]
"""One forward pass of a block on fixed inputs: block -> hidden states."""


@dataclass(frozen=True)
class Group:
    """Linears that read the same tensor, by their names inside the block, in the order of execution.

    norm: the name of the module that wrote the tensor and could take a scale per channel, or None.
    """

    linears: tuple[str, ...]
    norm: str | None


def find_groups(block: nn.Module, forward: Forward) -> list[Group]:
    """The groups of a block in the order of execution; a linear that did not run is a group of its own, at the end."""
    inputs: dict[str, Tensor] = {}  # kept alive, so that no storage is used twice
    outputs: dict[str, Tensor] = {}
    names = linears(block)
    handles = [module.register_forward_pre_hook(_reader(inputs, name)) for name, module in names.items()]
    for name, module in block.named_modules():
        weight = module._parameters.get("weight")
        if name not in names and weight is not None and weight.dim() == 1:
            handles.append(module.register_forward_hook(_writer(outputs, name)))
    try:
        forward(block)
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in inputs.items():
        groups.setdefault(_identity(tensor), []).append(name)
    norms = {_identity(tensor): name for name, tensor in outputs.items()}
    found = [Group(tuple(members), norms.get(key)) for key, members in groups.items()]
    return found + [Group((name,), None) for name in names if name not in inputs]


def _reader(inputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.setdefault(name, args[0])

    return hook


def _writer(outputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        if isinstance(output, Tensor):
            outputs[name] = output

    return hook


def _identity(tensor: Tensor) -> tuple[int, ...]:
    """What makes two tensors the same: storage, offset, shape and strides."""
    shape = (int(tensor.storage_offset()), *tensor.shape[-1:], tensor.numel())
    return (tensor.untyped_storage().data_ptr(), *shape)


@dataclass(frozen=True)
class Fold:
    """The outcome of an attempted fold: whether it is kept, how it was written, and the error that was measured."""

    kept: bool
    form: str
    error: float


def fold_into_norm(block: nn.Module, group: Group, scale: Float[Tensor, " in"], forward: Forward) -> Fold:
    """Divide the output of the group's norm by `scale` and multiply the columns of its linears by it.

    The rewrite is tried on a float32 copy of the block first: plainly, and then for norms that multiply by
    (1 + weight). The first form that leaves the block's output unchanged (relative error below FOLD_TOLERANCE) is
    applied; when none does, the block is left as it was.
    """
    assert group.norm is not None
    proof = copy.deepcopy(block).to(torch.float32)
    before = forward(proof)
    error = float("inf")
    for form in ("weight", "1 + weight"):
        trial = copy.deepcopy(proof)
        _scale_norm(trial.get_submodule(group.norm), scale, form)
        _scale_columns(trial, group, scale)
        error = relative_error(forward(trial), before)
        if error < FOLD_TOLERANCE:
            _scale_norm(block.get_submodule(group.norm), scale, form)
            _scale_columns(block, group, scale)
            return Fold(True, form, error)
    return Fold(False, "none", error)


def _scale_norm(norm: nn.Module, scale: Tensor, form: str) -> None:
    """Divide what the norm writes by `scale`, its weight being read as `weight` or as `1 + weight`."""
    weight = norm.get_parameter("weight")
    factor = scale.to(weight.dtype)
    new = weight / factor if form == "weight" else (1 + weight) / factor - 1
    norm.weight = nn.Parameter(new.detach(), requires_grad=False)
    bias = norm._parameters.get("bias")
    if bias is not None:
        norm.bias = nn.Parameter((bias / factor).detach(), requires_grad=False)


def _scale_columns(block: nn.Module, group: Group, scale: Tensor) -> None:
    """Multiply input column j of every linear of the group by scale[j]."""
    for name in group.linears:
        module = block.get_submodule(name)
        if isinstance(module, CompressedLinear):
            module.put(module.weight * scale.to(module.weight.dtype))
            continue
        layer = CompressedLinear.of(module)
        scaled = layer.weight * scale.to(layer.weight.dtype)
        module.weight = nn.Parameter((scaled.T if layer.transposed else scaled).contiguous(), requires_grad=False)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||, in float32; 0 for two zeros."""
    difference = torch.linalg.vector_norm(found.float() - wanted.float())
    size = torch.linalg.vector_norm(wanted.float())
    return float(difference / size) if float(size) > 0 else float(difference)
