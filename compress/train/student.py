"""The trained parameters of a model, selected by kind and by name; float32 during training, then in storage form."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor, nn

from compress.errors import TargetError
from compress.layers.embedding import CompressedEmbedding
from compress.layers.linear import CompressedLinear, linears
from compress.models.computation import kept_dtype
from compress.models.structure.blocks import find_blocks
from compress.train.linear import TrainedLinear
from compress.train.parametrization import Kind, ParameterKind, Parametrize, masked
from compress.train.sharded import full, split

KINDS: tuple[Kind, ...] = get_args(Kind)
UNTRAINED_SCALES = "scales that are not stored as floats are not trained"
"""The message of the journal for `Student.untrained_layers`."""


@dataclass
class Student:
    """A model in training.

    Attributes:
        model: the model.
        parameters: trained parameters, by kind and by full name.
        layers: linears with trained parameters, by full name.
        untrained_layers: packed layers whose scales cannot be trained although scales are.
        blocks: blocks of a complete model.
    """

    model: nn.Module
    parameters: dict[ParameterKind, dict[str, nn.Parameter]]
    layers: dict[str, TrainedLinear] = field(default_factory=dict)
    untrained_layers: list[str] = field(default_factory=list)
    blocks: list[nn.Module] = field(default_factory=list)

    def named(self) -> dict[str, nn.Parameter]:
        """Return all trained parameters by full name."""
        return {name: p for group in self.parameters.values() for name, p in group.items()}

    def sha256(self) -> str:
        """Return a digest of the fixed part of the packed layers, on which training depends."""
        digest = hashlib.sha256()
        for name, trained in self.layers.items():
            digest.update(f"{name} {trained.layer.sha256()} ".encode())
        return digest.hexdigest()

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers on which the next step depends by full name, such as masks that can change."""
        return {
            f"{name}.{buffer_name}": tensor
            for name, trained in self.layers.items()
            if trained.parametrization is not None
            for buffer_name, tensor in trained.parametrization.named_buffers()
        }

    def split(self, device: torch.device, processes: int, reshard: bool) -> Student:
        """Return a copy with parameters sharded over processes (`sharded.split`); this student moves to the CPU."""
        self.model.cpu()
        sharded = copy.deepcopy(self)
        for layer in sharded.layers.values():
            if layer.parametrization is not None:  # the weight of the layer would be an unsharded copy
                layer.layer.put(layer.weight.detach().to("meta"))
        names = {id(p): name for name, p in sharded.model.named_parameters()}
        split(sharded.model, sharded.blocks, device, processes, reshard)
        sharded_parameters = dict(sharded.model.named_parameters())
        for group in sharded.parameters.values():
            group.update({name: sharded_parameters[names[id(p)]] for name, p in group.items()})
        return sharded

    @torch.no_grad()
    def copy_from(self, source: Student, device: torch.device) -> None:
        """Copy the trained state of another student of the same structure, sharded or not; a collective operation."""
        self.model.to(device)
        for tensors, trained in ((self.named(), source.named()), (self.buffers(), source.buffers())):
            for name, tensor in tensors.items():
                tensor.copy_(full(trained[name].detach()))
        for layer in self.layers.values():
            if layer.parametrization is not None:
                layer.layer.put(layer.weight.detach())

    def adjust(self) -> None:
        """Apply `Parametrization.adjust` to the gradients of all weights, after the backward passes of a step."""
        with torch.no_grad():
            for layer in self.layers.values():
                layer.adjust()

    def decay(self, rate: float) -> None:
        """Apply `Parametrization.decay` to all weights.

        Args:
            rate: learning rate of weights in this step.
        """
        for layer in self.layers.values():
            layer.decay(rate)

    def update(self, step: int, total_steps: int) -> dict[str, float]:
        """Apply all updates after a step, and before the first (step = 0): positive scales, zeros at pruned weights.

        Args:
            step: number of completed steps.
            total_steps: number of steps of the training.

        Returns:
            The counts of parametrizations as fractions of all affected weights.
        """
        parts: dict[str, list[tuple[Tensor | float, int]]] = {}
        for layer in self.layers.values():
            for name, share in layer.update(step, total_steps).items():
                parts.setdefault(name, []).append(share)
        return {name: float(sum(n for n, _ in record)) / sum(m for _, m in record) for name, record in parts.items()}

    def ready(self, step: int, total_steps: int) -> bool:
        """Return whether the state after `step` steps may be the result."""
        parametrizations = [layer.parametrization for layer in self.layers.values()]
        return all(p.ready(step, total_steps) for p in parametrizations if p is not None)


@contextmanager
def trainable(
    model: nn.Module,
    train: Sequence[Kind] | None,
    is_target: Callable[[str], bool],
    storage: torch.dtype,
    label: str,
    parametrize: Parametrize = masked,
    is_whole_model: bool = True,
) -> Iterator[Student]:
    """Prepare the model for training in float32; on exit, restore every layer to its storage form.

    Scales, weights and biases are those of linears inside the blocks. Norms are all 1-dimensional parameters of other
    modules.

    Args:
        model: the model.
        train: kinds of parameters to train; None for all kinds that exist.
        is_target: whether a module is targeted, by its full name.
        storage: storage dtype.
        label: prefix of error messages.
        parametrize: creates the parametrization of the weight of a dense linear.
        is_whole_model: whether `model` is a complete model. False for one block, whose codes are unpacked to floats
            during training.

    Raises:
        TargetError: if a requested kind matches no parameter.
    """
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    student = Student(model, {kind: {} for kind in KINDS})
    dtypes = _widen(model)
    try:
        model.requires_grad_(False)
        _choose(student, train or KINDS, is_target, parametrize, is_whole_model)
        check_trained(train or (), [kind for kind in KINDS if student.parameters[kind]], label)
        for parameter in student.named().values():
            parameter.requires_grad_(True)
        yield student
    finally:
        _restore(student, dtypes, storage)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags.get(name, False))
            parameter.grad = None


def _choose(
    student: Student,
    train: Sequence[Kind],
    is_target: Callable[[str], bool],
    parametrize: Parametrize,
    is_whole_model: bool,
) -> None:
    """Select the trained parameters. All packed layers are replaced, trained or not, so that none is unpacked."""
    model, parameters = student.model, student.parameters
    names = [block.name for block in find_blocks(model)] if is_whole_model else []
    student.blocks = [model.get_submodule(name) for name in names]
    blocks = tuple(f"{name}." for name in names) if is_whole_model else ("",)
    if "norms" in train:
        norms = norms_of(model).items()
        parameters["norms"] |= {name: norm for name, norm in norms if is_target(name.rpartition(".")[0])}
    for name, module in linears(model).items():
        is_chosen = name.startswith(blocks) and is_target(name)
        is_packed = isinstance(module, CompressedLinear) and module.quantized
        trains_layer = "weights" in train or ("biases" in train and module.bias is not None)
        if is_packed or (is_chosen and trains_layer):
            trained = student.layers[name] = TrainedLinear(CompressedLinear.of(module), unpacked=not is_whole_model)
            _put(model, name, trained)
            if is_chosen:
                _choose_of_layer(student, name, trained, train, parametrize)


def _choose_of_layer(
    student: Student, name: str, trained: TrainedLinear, train: Sequence[Kind], parametrize: Parametrize
) -> None:
    is_packed, bias = trained.layer.quantized, trained.layer.bias
    if not is_packed and "weights" in train:
        parametrization = parametrize(name, trained.layer)
        weight = trained.train_weight(parametrization)
        if parametrization.trains_weight:
            student.parameters["weights"][f"{name}.weight"] = weight
        for parameter_name, parameter in parametrization.named_parameters():
            student.parameters[parametrization.parameter_kind][f"{name}.{parameter_name}"] = parameter
    elif is_packed and "scales" in train:
        if trained.scaled:
            factors = {f"{name}.{parameter_name}": factor for parameter_name, factor in trained.train_scales().items()}
            student.parameters["scales"].update(factors)
        else:
            student.untrained_layers.append(name)
    if bias is not None and "biases" in train:
        student.parameters["biases"][f"{name}.bias"] = bias


_REQUIRED = {
    "scales": "is packed with scales that are stored as floats",
    "norms": "has a norm (1-dimensional weights) that matches the targets",
    "weights": "is dense",
    "biases": "has a bias",
}


def check_trained(
    train: Sequence[str], available: Collection[str], label: str, weights_option: str | None = None
) -> None:
    """Raise TargetError if a requested kind matches no parameter, or no kind does.

    Args:
        train: requested kinds; empty for all that exist.
        available: kinds with parameters among the targeted modules.
        label: prefix of error messages.
        weights_option: option of the pass that is of no use without weights.
    """
    for kind in train:
        if kind not in available:
            other_kinds = ", ".join(other for other in KINDS if other in available)
            remedy = f"write train: [{other_kinds}]" if available else "widen its targets"
            if available and kind == "weights" and weights_option is not None:
                remedy += f" and leave {weights_option} out"
            raise TargetError(
                f"{label}: train: {kind} matches no parameter: none of the targeted modules {_REQUIRED[kind]}; {remedy}"
            )
    if not available:
        raise TargetError(f"{label}: the targeted modules have no parameters to train; widen its targets")


def norms_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the 1-dimensional parameters of modules other than linears, by full name."""
    of_linears = {id(parameter) for module in linears(model).values() for parameter in module.parameters()}
    return {name: p for name, p in model.named_parameters() if p.dim() == 1 and id(p) not in of_linears}


def _widen(model: nn.Module) -> dict[str, torch.dtype]:
    """Cast all float parameters to float32, exact for 16-bit floats, and return their original dtypes by name."""
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    _cast(model, dict.fromkeys(dtypes, torch.float32), torch.float32)
    return dtypes


def _cast(model: nn.Module, dtypes: dict[str, torch.dtype], dense: torch.dtype) -> None:
    """Cast parameters to the dtypes by name, and dense weights and embeddings of compressed layers to `dense`."""
    for name, parameter in model.named_parameters():
        if name in dtypes:
            parameter.data = parameter.data.to(dtypes[name])
    for layer in model.modules():
        if isinstance(layer, CompressedLinear) and not layer.quantized:
            layer.change_parts(lambda part: part.in_storage(dense))
        elif isinstance(layer, CompressedEmbedding):
            layer.dtype_of_computation = layer.dtype_of_computation.to(dense)


@torch.no_grad()
def _restore(student: Student, dtypes: dict[str, torch.dtype], storage: torch.dtype) -> None:
    """Restore every layer and every parameter to its storage form."""
    compute = next(iter(dtypes.values()), torch.float32)
    for kind in ("norms", "biases"):
        for name, parameter in student.parameters[kind].items():
            parameter.data = parameter.data.to(kept_dtype(student.model, name, storage))
    for name, trained in student.layers.items():
        _put(student.model, name, trained.finalize(storage, compute))
    _cast(student.model, dtypes, compute)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
