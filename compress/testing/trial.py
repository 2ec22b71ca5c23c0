"""PassTrial: a pass, what it is tried on, and the comparison of models tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.layers.linear import CompressedLinear, linears
from compress.models.caches.quantized import SCALES, attentions_with_cache, cache_sha256, scheme_of
from compress.models.structure.blocks import find_blocks
from compress.passes.contract.passes import LayerPass, Pass
from compress.pipeline.apply import apply

P = TypeVar("P", bound=Pass)
Tensors = dict[str, Tensor]


def require(condition: object, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def changed(step: P, **options: Any) -> P:
    """The same pass with other options, validated."""
    return type(step).model_validate({**step.model_dump(mode="json"), **options})


def _digest(text: str) -> Tensor:
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()))


def tensors_of(model: PreTrainedModel) -> Tensors:
    """The dense weight of every linear, digests of the treatment of its inputs and of the cache, all other tensors."""
    layers = {name: CompressedLinear.of(layer) for name, layer in linears(model).items()}
    found = {f"{name}.weight": layer.weight.clone() for name, layer in layers.items()}
    for name, layer in layers.items():
        found[f"{name}.inputs"] = _digest(repr([t.sha256() for t in layer.all_transforms]))
    held = tuple(f"{name}." for name in layers)
    rest = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(held)}
    found |= {name: tensor.clone() for name, tensor in rest.items() if not name.endswith(SCALES)}
    for name, attention in attentions_with_cache(model).items():
        found[f"{name}.cache"] = _digest("" if scheme_of(attention) is None else cache_sha256(attention))
    return found


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that differ. Raises AssertionError if the models have other tensors."""
    require(one.keys() == other.keys(), f"tensors of one model alone: {sorted(one.keys() ^ other.keys())[:3]}")
    return [name for name in one if not torch.equal(one[name], other[name])]


@dataclass(eq=False)
class PassTrial:
    """A pass and what it is tried on.

    fresh: makes the same model at every call, with at least three blocks. ids: calibration ids. before, after: the
    passes that it needs around it. plugins: the files of these passes, if they come from files.
    """

    step: Pass
    fresh: Callable[[], PreTrainedModel]
    ids: Tensor
    before: tuple[Pass, ...] = ()
    after: tuple[Pass, ...] = ()
    plugins: tuple[str, ...] = ()

    @property
    def chain(self) -> list[Pass]:
        """The pass among those around it."""
        return self.with_step(self.step)

    def with_step(self, *steps: Pass) -> list[Pass]:
        """The passes around it, and others in its place."""
        return [*self.before, *steps, *self.after]

    @property
    def label(self) -> str:
        """The label of the pass in the chain."""
        return f"passes[{len(self.before)}] {self.step.key()}"

    def tensors(self, *steps: Pass) -> Tensors:
        """`tensors_of` the model after the chain with these passes in place of the pass."""
        chain = self.with_step(*steps)
        return tensors_of(apply(self.fresh(), chain, self.ids) if chain else self.fresh())

    @cached_property
    def applied(self) -> Tensors:
        """`tensors_of` the model after the chain, computed once."""
        return self.tensors(self.step)

    @cached_property
    def original(self) -> Tensors:
        """`tensors_of` the model before the chain."""
        return tensors_of(self.fresh())

    @cached_property
    def blocks(self) -> list[str]:
        """The names of the blocks."""
        return [block.name for block in find_blocks(self.fresh())]

    def part(self) -> tuple[str, list[str]]:
        """A pattern of what the pass is held to, and patterns of this and some more: one linear, or one block."""
        second, third = self.blocks[1:3]
        if not isinstance(self.step, LayerPass):
            return f"{second}.*", [f"{second}.*", f"{third}.*"]
        inside = [name for name in linears(self.fresh()) if name.startswith(f"{second}.")]
        return inside[1], [f"{second}.*"]
