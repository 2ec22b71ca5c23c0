"""The number of experts: find the tensor dimensions that count them, verify their order, and build a model with fewer.

The class of a model plays no part. The configuration entry is found by its value, the tensors of a router by their
shapes in the model of the changed configuration. Their order is verified by a permutation: if experts and the rows of
the router are permuted alike, the output of their module must not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import ModelError, call_foreign
from compress.models.experts import Experts, computed_by, roles
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.models.kinds.contract import with_cache
from compress.models.reshape.reconfigure import Shapes, build, changed, entries, shapes, sketch, tensors
from compress.models.structure.blocks import find_blocks, hidden_of

LIMIT, LIMIT_16_BITS = 1e-3, 0.05
"""Largest error of a permutation of experts and router, relative to that of the experts alone: by dtype of the model.

Equal sums give 1e-6 in float32 and 1e-2 in 16 bits; a router in another order gives more than 0.1.
"""
REROUTED = 16  # one token of so many may have two equally good experts, of which the order decides
META_TOKENS = 16


@dataclass(frozen=True)
class FewerExperts:
    """How a model gets fewer experts.

    Attributes:
        count: experts of each set before.
        kept: experts of each set after.
        sets: full names of the sets of experts, in order.
        axes: router tensor -> the dimension that counts the experts of its set.
        config: configuration with `kept` experts.
        sketch: model of that configuration on the meta device.
    """

    count: int
    kept: int
    sets: tuple[str, ...]
    axes: Mapping[str, int]
    config: PretrainedConfig
    sketch: PreTrainedModel

    def taken(
        self, model: nn.Module, numbers: Mapping[str, Sequence[int]], rows: Mapping[str, Sequence[int]]
    ) -> dict[str, Tensor]:
        """Return the tensors of the model with some experts of each set, under the names of the new model.

        Tensors of experts are not copied.

        Args:
            numbers: old numbers of the experts in their new order, by set.
            rows: the same for their routers; routers of other sets are unchanged.
        """
        tensor_of, inside = tensors(model), tuple(f"{name}." for name in self.sets)
        new = {name: tensor for name, tensor in tensor_of.items() if not name.startswith(inside)}
        for name, order in numbers.items():
            new |= {new: tensor_of[old] for old, new in renumbered_experts(tensor_of, name, order).items()}
        for name, order in rows.items():
            for router in [tensor for tensor in self.axes if tensor.startswith(_parent(name))]:
                index = torch.tensor(order, device=new[router].device)
                new[router] = new[router].index_select(self.axes[router], index)
        return new


def _parent(name: str) -> str:
    """Return the beginning of the names in the module that holds a set of experts and their router."""
    return name.rpartition(".")[0] + "."


def expert_sets(model: nn.Module) -> dict[str, Experts]:
    """Return the opened sets of experts inside the blocks, by full name."""
    return {
        f"{block.name}.{name}": module
        for block in find_blocks(model)
        for name, module in block.module.named_modules()
        if isinstance(module, Experts)
    }


def renumbered_experts(names: Iterable[str], set_name: str, order: Sequence[int]) -> dict[str, str]:
    """Return tensor name -> name when a set has these experts in this order, without tensors of other experts."""
    places = {str(old): new for new, old in enumerate(order)}
    start, new_names = f"{set_name}.", {}
    for name in names:
        number, _, inner_name = name.removeprefix(start).partition(".")
        if name.startswith(start) and number in places:
            new_names[name] = f"{start}{places[number]}.{inner_name}"
    return new_names


def fewer_experts(model: PreTrainedModel, kept: int) -> FewerExperts:
    """Find the configuration with `kept` experts in each set, and the tensors of routers that count them.

    Args:
        model: model whose sets all have the same number of experts; its weights may be on the meta device.

    Raises:
        ModelError: if no entry of the configuration sets the number of experts alone.
    """
    sets, old_shapes = expert_sets(model), shapes(model)
    count = next(iter(sets.values())).count
    paths = [path for path, value in entries(model.config).items() if type(value) is int and value == count]
    paths.sort(key=lambda path: "expert" not in path[-1])  # likely entries first: each try builds a model
    for edited in (subset for size in (1, 2) for subset in combinations(paths, size)):
        config = changed(model.config, dict.fromkeys(edited, kept))
        small = None if config is None else sketch(model, config)
        axes = None if small is None else _axes(old_shapes, shapes(small), tuple(sets), (count, kept))
        if config is not None and small is not None and axes is not None:
            return FewerExperts(count, kept, tuple(sets), axes, config, small)
    raise ModelError(
        f"model: no entry of its configuration sets the number of experts to {kept} of {count} and changes nothing but "
        "the experts and their routers; keep all experts"
    )


def _axes(old: Shapes, new: Shapes, sets: Sequence[str], sizes: tuple[int, int]) -> dict[str, int] | None:
    """Return the dimension of each router tensor that counts experts; None if anything else differs."""
    inside = tuple(f"{name}." for name in sets)
    expected = {name for name in old if not name.startswith(inside)}
    expected |= {new for name in sets for new in renumbered_experts(old, name, range(sizes[1])).values()}
    if new.keys() != expected:
        return None
    axes: dict[str, int] = {}
    for name in expected:
        if old[name] == new[name]:
            continue
        differing = [dim for dim, pair in enumerate(zip(old[name], new[name], strict=False)) if pair[0] != pair[1]]
        is_router = name.startswith(tuple(map(_parent, sets))) and len(old[name]) == len(new[name])
        if not is_router or len(differing) != 1 or (old[name][differing[0]], new[name][differing[0]]) != sizes:
            return None
        axes[name] = differing[0]
    return axes


def group_numbers(config: PretrainedConfig, count: int) -> list[int]:
    """Return the numbers of groups into which a router may divide its experts, by the entries of the configuration."""
    values = {v for path, v in entries(config).items() if type(v) is int and "group" in path[-1]}
    return sorted(value for value in values if 1 < value < count and count % value == 0)


def experts_per_token(model: PreTrainedModel) -> int:
    """Return the largest number of experts that the routers of a model choose for a token.

    Args:
        model: if its weights are not on the meta device, a model without weights is built and run instead.

    Raises:
        CannotRun: if the model does not run on tensors without data.
    """
    is_empty = all(parameter.is_meta for parameter in model.parameters())
    empty_model = model if is_empty else sketch(model, model.config)
    chosen_counts = [0]

    def record(experts: Experts, *args: Tensor) -> Tensor:
        x, chosen, _ = roles(args)
        chosen_counts.append(chosen.shape[-1])
        return torch.zeros_like(x)

    if empty_model is not None:
        ids = torch.zeros(1, META_TOKENS, dtype=torch.long, device="meta")
        with torch.no_grad(), computed_by(empty_model, record):
            call_foreign(empty_model.eval(), input_ids=ids, **with_cache(empty_model))
    return max(chosen_counts)


@torch.no_grad()
def proved_groups(model: PreTrainedModel, fewer: FewerExperts, example: Batch, label: str) -> int:
    """Return in how many groups the experts may be permuted; 1: they are interchangeable.

    Each module that holds a set of experts and their router computes its inputs of the example three times: as it is,
    with experts and router permuted alike, and with permuted experts alone, which is the scale of the error. Where a
    router chooses groups of experts first, only permutations inside of the groups leave the output unchanged.

    Raises:
        ModelError: if no permutation leaves the output unchanged.
    """
    for groups in [1, *group_numbers(model.config, fewer.count)]:
        draw = torch.Generator().manual_seed(0)
        orders = {name: _cycles(fewer.count, groups, draw) for name in fewer.sets}
        if _leaves_outputs(model, fewer, orders, example):
            return groups
    raise ModelError(
        f"{label}: a permutation of the experts and of the rows of their router changes the output, so the rows cannot "
        "be assigned to experts; keep all experts"
    )


def _cycles(count: int, groups: int, draw: torch.Generator) -> list[int]:
    """Return a random permutation that moves every expert inside of its group."""
    order = list(range(count))
    size = count // groups
    for start in range(0, count, size):
        ring = (start + torch.randperm(size, generator=draw)).tolist()
        for place, number in zip(ring, [*ring[1:], ring[0]], strict=True):
            order[place] = number
    return order


def _leaves_outputs(
    model: PreTrainedModel, fewer: FewerExperts, orders: Mapping[str, Sequence[int]], example: Batch
) -> bool:
    """Return whether experts and routers in this order compute the outputs of the model, in each module."""
    permuted = build(model, model.config, fewer.taken(model, orders, orders))
    misplaced = build(model, model.config, fewer.taken(model, orders, {}))
    owners = sorted({name.rpartition(".")[0] for name in fewer.sets})
    holds: list[bool] = []

    def compare(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        expected = hidden_of(output)
        actual, wrong = (hidden_of(other.get_submodule(name)(*args, **kwargs)) for other in (permuted, misplaced))
        limit = LIMIT if expected.dtype in (torch.float32, torch.float64) else LIMIT_16_BITS
        holds.append(_distance(actual, expected) <= limit * _distance(wrong, expected))

    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, kwargs, output, name=name: compare(name, args, kwargs, output), with_kwargs=True
        )
        for name in owners
    ]
    try:
        logits_of(model, example)
    finally:
        for hook in hooks:
            hook.remove()
    return all(holds)


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference without the tokens with the largest ones (`REROUTED`)."""
    squares = (actual.float() - expected.float()).square().flatten(0, -2).sum(1).sort().values
    return float(squares[: len(squares) - len(squares) // REROUTED].sum().sqrt())


def release_dropped(model: nn.Module) -> None:
    """Copy the tensors of all experts, one set at a time: as views they keep those of dropped experts in memory."""
    for experts in expert_sets(model).values():
        for tensor in (*experts.parameters(), *experts.buffers()):
            tensor.data = tensor.data.clone()


def highest(scores: Tensor, kept: int, groups: int) -> Int[Tensor, " kept"]:
    """Return the numbers of the experts with the highest scores, in ascending order: equally many of each group."""
    by_group = scores.reshape(groups, -1)
    order = by_group.argsort(dim=1, descending=True, stable=True)[:, : kept // groups]
    return (order + by_group.shape[1] * torch.arange(groups)[:, None]).flatten().sort().values
