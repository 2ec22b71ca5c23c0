"""Build a model of the same class from a changed configuration, with fewer blocks or smaller widths, and move weights.

The configuration entries for the number of blocks or for a width are found by their values. A change is verified by
building the model without weights: it must have exactly the expected tensors with exactly the expected shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from compress.errors import CannotRun, ModelError, call_foreign
from compress.layers.linear import CompressedLinear
from compress.models.computation import to_device
from compress.models.experts import open_experts
from compress.models.quiet import BUILDING
from compress.models.structure.blocks import find_blocks
from compress.models.tensors import assign

Path = tuple[str, ...]
"""The place of a configuration entry: the keys from the outermost sub-configuration to the entry."""

Shapes = dict[str, tuple[int, ...]]
"""The shape of every stored tensor of a model, by name."""

NO_SIZES = ("token_id", "label2id", "id2label")
"""Suffixes of keys whose values are integers but not sizes."""


def entries(config: PretrainedConfig) -> dict[Path, Any]:
    """Return every value of a configuration by its place, including those of sub-configurations and None."""

    def walk(values: Mapping[str, Any], path: Path) -> dict[Path, Any]:
        values_by_path: dict[Path, Any] = {}
        for key, value in values.items():
            if key.startswith("_") or key.endswith(NO_SIZES):
                continue
            values_by_path |= walk(value, (*path, key)) if isinstance(value, Mapping) else {(*path, key): value}
        return values_by_path

    return walk(config.to_dict(), ())


def changed(config: PretrainedConfig, edits: Mapping[Path, Any]) -> PretrainedConfig | None:
    """Return the configuration with changed values, as read from a file; None when transformers rejects it."""
    values = config.to_dict()
    for path, value in edits.items():
        part = values
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
    try:
        return call_foreign(type(config).from_dict, values)
    except CannotRun:
        return None


def sketch(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel | None:
    """Return the model of another configuration on the meta device; None when its class cannot build it."""
    try:
        with BUILDING, torch.device("meta"):
            empty_model = call_foreign(type(model)._from_config, copy.deepcopy(config))
    except CannotRun:
        return None
    open_experts(empty_model)
    return empty_model


def shapes(model: nn.Module) -> Shapes:
    """Return the shapes of all tensors; compressed linears count as the dense layers that they replaced."""
    return {name: tuple(tensor.shape) for name, tensor in tensors(model).items()}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors by the names that the model class uses, including compressed linears, which must be dense."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, CompressedLinear)}
    prefixes = tuple(f"{name}." for name in layers)
    tensor_by_name = {name: t.detach() for name, t in model.state_dict().items() if not name.startswith(prefixes)}
    for name, layer in layers.items():
        assert layer.scheme.plain, "a model must change its shape before it is compressed"
        tensor_by_name[f"{name}.weight"] = layer.weight.T if layer.transposed else layer.weight
        if layer.bias is not None:
            tensor_by_name[f"{name}.bias"] = layer.bias.detach()
    return tensor_by_name


def find_config(
    model: PreTrainedModel, expected: Shapes, edits: Iterable[Mapping[Path, Any]]
) -> PretrainedConfig | None:
    """Return the configuration of the first edits that lead to exactly the expected tensor shapes, or None."""
    for candidate in edits:
        config = changed(model.config, candidate)
        built = None if config is None else sketch(model, config)
        if built is not None and shapes(built) == expected:
            return config
    return None


def renumbered(model: nn.Module, block_numbers: Sequence[int]) -> dict[str, str]:
    """Return tensor name -> name when only these blocks are left, without tensors of the removed blocks."""
    blocks = find_blocks(model)
    start = blocks[0].name.rpartition(".")[0] + "."
    places = {str(old): str(new) for new, old in enumerate(block_numbers)}
    new_names = {}
    for name in tensors(model):
        number, _, inner_name = name.removeprefix(start).partition(".")
        if not name.startswith(start):
            new_names[name] = name
        elif number in places:
            new_names[name] = f"{start}{places[number]}.{inner_name}"
    return new_names


def with_blocks(model: PreTrainedModel, block_numbers: Sequence[int]) -> PretrainedConfig:
    """Return the configuration for these blocks only: with fewer blocks, and every per-block list cut.

    Args:
        model: model with all blocks.
        block_numbers: blocks that are left.

    Raises:
        ModelError: if no change of the configuration leads to the tensors of these blocks.
    """
    count, remaining, values = len(find_blocks(model)), len(block_numbers), entries(model.config)
    numbers = [path for path, value in values.items() if type(value) is int and value == count]
    numbers.sort(key=lambda path: "layer" not in path[-1])  # likely entries first: each try builds a model
    lists = {
        path: [v[i] for i in block_numbers] for path, v in values.items() if isinstance(v, list) and len(v) == count
    }
    path_sets = [paths for size in (1, 2) for paths in combinations(numbers, size)]
    edits = [dict.fromkeys(paths, remaining) | cut for paths in path_sets for cut in ([lists, {}] if lists else [{}])]
    old_shapes = shapes(model)
    config = find_config(model, {new: old_shapes[old] for old, new in renumbered(model, block_numbers).items()}, edits)
    if config is None:
        raise ModelError(
            f"model: no entry of its configuration sets the number of blocks to {remaining} of {count} and keeps their "
            "kinds; drop other blocks, or none"
        )
    return config


def build(model: PreTrainedModel, config: PretrainedConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Build the model of another configuration with these tensors; tied tensors are tied again.

    Raises:
        ModelError: if a tensor is missing.
    """
    weight = next(iter(weights.values()))
    kind = getattr(model.config, "_attn_implementation", None)
    with BUILDING, init_empty_weights(), no_init_weights():
        new = type(model)._from_config(copy.deepcopy(config), dtype=weight.dtype, attn_implementation=kind)
    open_experts(new)
    tied = set(getattr(new, "all_tied_weights_keys", None) or {})
    names = new.state_dict().keys()
    assign(new, {name: tensor for name, tensor in weights.items() if name not in tied and name in names})
    new.tie_weights()
    missing = [name for name, tensor in new.state_dict().items() if tensor.is_meta]
    if missing:
        raise ModelError(f"model: its new configuration needs {missing[0]}, which the model does not have")
    to_device(new, weight.device)
    if hasattr(model, "generation_config"):  # encoders have none
        new.generation_config = model.generation_config
    new.train(model.training)
    return new.requires_grad_(False)


def replace_in_place(model: nn.Module, source: nn.Module) -> None:
    """Replace all state of the model by that of another model of its class; the object stays the same."""
    assert type(model) is type(source)
    vars(model).clear()
    vars(model).update(vars(source))
