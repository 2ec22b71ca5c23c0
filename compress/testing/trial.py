"""`PassTrial`: a pass and the model it is tried on, and the comparison of models tensor by tensor."""

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
from compress.models.caches.attentions import attentions_with_cache, cache_digests, cache_policies
from compress.models.caches.base import tensor_names
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
    """Return the same pass with other options, validated."""
    return type(step).model_validate({**step.model_dump(mode="json"), **options})


def _digest(text: str) -> Tensor:
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()))


def tensors_of(model: PreTrainedModel) -> Tensors:
    """Return the dense weight of each linear, digests of its transforms and of the cache, and all other tensors."""
    layers = {name: CompressedLinear.of(layer) for name, layer in linears(model).items()}
    tensors = {f"{name}.weight": layer.weight.clone() for name, layer in layers.items()}
    for name, layer in layers.items():
        tensors[f"{name}.inputs"] = _digest(repr([t.sha256() for t in layer.all_transforms]))
    layer_prefixes = tuple(f"{name}." for name in layers)
    other_tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(layer_prefixes)}
    policy_tensors = tensor_names(cache_policies(model))
    tensors |= {name: tensor.clone() for name, tensor in other_tensors.items() if name not in policy_tensors}
    digests = cache_digests(model)
    return tensors | {f"{name}.cache": _digest(digests.get(name, "")) for name in attentions_with_cache(model)}


def differing(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ.

    Raises:
        AssertionError: if the models do not have the same tensor names.
    """
    unpaired = sorted(tensors.keys() ^ expected.keys())
    require(not unpaired, f"tensors of one model alone: {unpaired[:3]}")
    return [name for name in tensors if not torch.equal(tensors[name], expected[name])]


@dataclass(eq=False)
class PassTrial:
    """A pass and the model it is tried on.

    Attributes:
        step: the pass.
        fresh: makes the same model at every call, with at least three blocks.
        ids: calibration ids, [sequences, length].
        preceding: passes that must precede it.
        following: passes that must follow it.
        plugins: files of these passes, if they come from files.
    """

    step: Pass
    fresh: Callable[[], PreTrainedModel]
    ids: Tensor
    preceding: tuple[Pass, ...] = ()
    following: tuple[Pass, ...] = ()
    plugins: tuple[str, ...] = ()

    @property
    def chain(self) -> list[Pass]:
        """The pass with its preceding and following passes."""
        return self.with_step(self.step)

    def with_step(self, *steps: Pass) -> list[Pass]:
        """Return the preceding passes, these passes, and the following passes."""
        return [*self.preceding, *steps, *self.following]

    @property
    def label(self) -> str:
        """The label of the pass in the chain."""
        return f"passes[{len(self.preceding)}] {self.step.key()}"

    def tensors(self, *steps: Pass) -> Tensors:
        """Return `tensors_of` the model after the chain with these passes in place of the pass."""
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
        """Return a pattern of one linear (or block), and patterns of that and some more, as targets of the pass."""
        second, third = self.blocks[1:3]
        if not isinstance(self.step, LayerPass):
            return f"{second}.*", [f"{second}.*", f"{third}.*"]
        inside = [name for name in linears(self.fresh()) if name.startswith(f"{second}.")]
        return inside[1], [f"{second}.*"]
