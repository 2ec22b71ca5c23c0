"""The trained part of a model: selected by kind and by name, float32 during training, then in its storage form."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor, nn

from compress.errors import TargetError
from compress.layers.embedding import CompressedEmbedding
from compress.layers.linear import CompressedLinear, linears
from compress.models.structure.blocks import find_blocks
from compress.train.linear import TrainedLinear
from compress.train.parametrization import Kind, ParameterKind, Parametrize, masked
from compress.train.sharded import full, split

KINDS: tuple[Kind, ...] = get_args(Kind)
KEPT = "scales that are not stored as floats are not trained"
"""The journal's message about `Student.kept`."""


@dataclass
class Student:
    """A model in training.

    parameters: the trained parameters, by kind and by full name. layers: linears with trained parameters, by full name.
    kept: packed layers whose scales cannot be trained although scales are. blocks: the blocks of a whole model.
    """

    model: nn.Module
    parameters: dict[ParameterKind, dict[str, nn.Parameter]]
    layers: dict[str, TrainedLinear] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    blocks: list[nn.Module] = field(default_factory=list)

    def named(self) -> dict[str, nn.Parameter]:
        """All trained parameters, by full name."""
        return {name: p for group in self.parameters.values() for name, p in group.items()}

    def sha256(self) -> str:
        """A digest of the fixed part of the packed layers, on which training depends."""
        found = hashlib.sha256()
        for name, trained in self.layers.items():
            found.update(f"{name} {trained.layer.sha256()} ".encode())
        return found.hexdigest()

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that the next step depends on, by full name: masks that can change, for example."""
        return {
            f"{name}.{own}": tensor
            for name, trained in self.layers.items()
            if trained.parametrization is not None
            for own, tensor in trained.parametrization.named_buffers()
        }

    def split(self, device: torch.device, processes: int, reshard: bool) -> Student:
        """Return a copy with parameters sharded over processes (`sharded.split`); this student moves to the CPU."""
        self.model.cpu()
        other = copy.deepcopy(self)
        for layer in other.layers.values():
            if layer.parametrization is not None:  # the layer's own weight is a whole copy
                layer.layer.put(layer.weight.detach().to("meta"))
        names = {id(p): name for name, p in other.model.named_parameters()}
        split(other.model, other.blocks, device, processes, reshard)
        found = dict(other.model.named_parameters())
        for group in other.parameters.values():
            group.update({name: found[names[id(p)]] for name, p in group.items()})
        return other

    @torch.no_grad()
    def copy_from(self, other: Student, device: torch.device) -> None:
        """Copy the trained state of another student of the same structure, sharded or not; a collective operation."""
        self.model.to(device)
        for own, trained in ((self.named(), other.named()), (self.buffers(), other.buffers())):
            for name, tensor in own.items():
                tensor.copy_(full(trained[name].detach()))
        for layer in self.layers.values():
            if layer.parametrization is not None:
                layer.layer.put(layer.weight.detach())

    def adjust(self) -> None:
        """Let parametrizations adjust the gradients of their weights, after the backward passes of a step."""
        with torch.no_grad():
            for layer in self.layers.values():
                layer.adjust()

    def decay(self, rate: float) -> None:
        """Let parametrizations shrink their weights. rate: the learning rate of weights in this step."""
        for layer in self.layers.values():
            layer.decay(rate)

    def update(self, done: int, of: int) -> dict[str, float]:
        """Apply all updates after a step, and before the first (done = 0): positive scales, zeros at pruned weights.

        Returns the counts of parametrizations as fractions of all weights concerned.
        """
        parts: dict[str, list[tuple[Tensor | float, int]]] = {}
        for layer in self.layers.values():
            for name, share in layer.update(done, of).items():
                parts.setdefault(name, []).append(share)
        return {name: float(sum(n for n, _ in record)) / sum(m for _, m in record) for name, record in parts.items()}

    def ready(self, done: int, of: int) -> bool:
        """Whether the state after so many steps may be kept."""
        found = [layer.parametrization for layer in self.layers.values()]
        return all(p.ready(done, of) for p in found if p is not None)


@contextmanager
def trainable(
    model: nn.Module,
    train: Sequence[Kind] | None,
    takes: Callable[[str], bool],
    storage: torch.dtype,
    where: str,
    parametrize: Parametrize = masked,
    whole: bool = True,
) -> Iterator[Student]:
    """Prepare the model for training, in float32; on exit, restore every layer to its storage form.

    train: the kinds to train; None: all that there are. takes: whether a module's full name is targeted; scales,
    weights and biases are those of linears inside the blocks, norms are all 1-dimensional parameters of other modules.
    parametrize: how the weights of dense linears are trained. whole: `model` is a whole model; False: it is one block,
    and codes are unpacked to floats in the meantime.

    Raises TargetError when a requested kind matches no parameter.
    """
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    student = Student(model, {kind: {} for kind in KINDS})
    dtypes = _widen(model)
    try:
        model.requires_grad_(False)
        _choose(student, train or KINDS, takes, parametrize, whole)
        _check(student, train, where)
        for parameter in student.named().values():
            parameter.requires_grad_(True)
        yield student
    finally:
        _restore(student, dtypes, storage)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags.get(name, False))
            parameter.grad = None


def _choose(
    student: Student, train: Sequence[Kind], takes: Callable[[str], bool], parametrize: Parametrize, whole: bool
) -> None:
    """Select the trained parameters; all packed layers are replaced, trained or not, so that none is unpacked."""
    model, found = student.model, student.parameters
    names = [block.name for block in find_blocks(model)] if whole else []
    student.blocks = [model.get_submodule(name) for name in names]
    blocks = tuple(f"{name}." for name in names) if whole else ("",)
    every = linears(model)
    shared = {
        id(parameter) for module in every.values() for parameter in module.parameters()
    }  # for example a head's bias
    for name, module in every.items():
        chosen = name.startswith(blocks) and takes(name)
        packed = isinstance(module, CompressedLinear) and module.quantized
        some = "weights" in train or ("biases" in train and module.bias is not None)
        if packed or (chosen and some):
            trained = student.layers[name] = TrainedLinear(CompressedLinear.of(module), unpacked=not whole)
            _put(model, name, trained)
            if chosen:
                _choose_of_layer(student, name, trained, train, parametrize)
    held = tuple(f"{name}." for name in every)
    free = {n: p for n, p in model.named_parameters() if not n.startswith(held) and id(p) not in shared}
    for name, parameter in free.items():
        if parameter.dim() == 1 and takes(name.rpartition(".")[0]) and "norms" in train:
            found["norms"][name] = parameter


def _choose_of_layer(
    student: Student, name: str, trained: TrainedLinear, train: Sequence[Kind], parametrize: Parametrize
) -> None:
    packed, bias = trained.layer.quantized, trained.layer.bias
    if not packed and "weights" in train:
        how = parametrize(name, trained.layer)
        weight = trained.train_weight(how)
        if how.trains_weight:
            student.parameters["weights"][f"{name}.weight"] = weight
        for own, parameter in how.named_parameters():
            student.parameters[how.own][f"{name}.{own}"] = parameter
    elif packed and "scales" in train:
        if trained.scaled:
            factors = {f"{name}.{own}": factor for own, factor in trained.train_scales().items()}
            student.parameters["scales"].update(factors)
        else:
            student.kept.append(name)
    if bias is not None and "biases" in train:
        student.parameters["biases"][f"{name}.bias"] = bias


_NEEDED: dict[Kind, str] = {
    "scales": "is packed with scales that are stored as floats",
    "norms": "has a norm (1-dimensional weights) that matches the targets",
    "weights": "is dense",
    "biases": "has a bias",
}


def _check(student: Student, train: Sequence[Kind] | None, where: str) -> None:
    for kind in train or ():
        if not student.parameters[kind]:
            raise TargetError(
                f"{where}: train: {kind} matches no parameter: none of the targeted modules {_NEEDED[kind]}; "
                f"remove {kind} from train"
            )
    if not student.named():
        raise TargetError(f"{where}: the targeted modules have no parameters to train; widen its targets")


def _widen(model: nn.Module) -> dict[str, torch.dtype]:
    """Cast all floating-point parameters to float32, exact for 16-bit floats; return their old dtypes by name."""
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    _cast(model, dict.fromkeys(dtypes, torch.float32), torch.float32)
    return dtypes


def _cast(model: nn.Module, dtypes: dict[str, torch.dtype], dense: torch.dtype) -> None:
    """Cast parameters to the dtypes given by name, dense weights and embeddings of compressed layers to `dense`."""
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
    compute = next(iter(dtypes.values()), torch.float32)
    for kind in ("norms", "biases"):
        for parameter in student.parameters[kind].values():
            parameter.data = parameter.data.to(storage)
    for name, trained in student.layers.items():
        _put(student.model, name, trained.finalize(storage, compute))
    _cast(student.model, dtypes, compute)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
