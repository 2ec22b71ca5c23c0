"""Find the tensors of a model among those of its files."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from torch import nn

from compress.checkpoint.sources.stored import Place
from compress.errors import ModelError
from compress.models.experts import renamed


def match(model: nn.Module, stored: Mapping[str, Place], packed: Set[str] = frozenset()) -> dict[str, Place] | None:
    """Find the stored tensor of every tensor of a model.

    Args:
        packed: linears whose weight is stored in another form.

    Returns:
        Places by name; None when a shape differs, or a name cannot be resolved by renaming.

    Raises:
        ModelError: for weights that are integers or 8-bit floats.
    """
    places, missing = _places(model, stored, packed)
    if missing:
        return None
    state = model.state_dict(keep_vars=True)
    dense = {name: place for name, place in places.items() if not _is_packed(name, packed)}
    for name, (path, key, header) in dense.items():
        if state[name].is_floating_point() and not (header.floating and header.bits >= 16):
            raise ModelError(
                f"model: {key} in {path} holds {header.dtype}, not floats of 16 bits or more, and quantization_config "
                "of config.json does not describe it; fetch the files again"
            )
    return places if all(place.header.shape == tuple(state[name].shape) for name, place in dense.items()) else None


def lacking(model: nn.Module, folder: Path, stored: Mapping[str, Place], packed: Set[str] = frozenset()) -> ModelError:
    """Return the error for a model that `match` does not find in the files of its folder."""
    places, missing = _places(model, stored, packed)
    if missing:
        return ModelError(
            f"model: {folder} lacks tensors of its model; write it again ({len(missing)} are missing, the first is "
            f"{missing[0]})"
        )
    state = model.state_dict(keep_vars=True)
    for name, place in places.items():
        if not _is_packed(name, packed) and place.header.shape != tuple(state[name].shape):
            stored_shape, model_shape = list(place.header.shape), list(state[name].shape)
            return ModelError(f"model: {name} is {stored_shape} in {place.path}, but {model_shape} by its config.json")
    raise AssertionError("match finds this model")


def _places(model: nn.Module, stored: Mapping[str, Place], packed: Set[str]) -> tuple[dict[str, Place], list[str]]:
    """Places by the names of the model's tensors, and the names of tensors that are not stored."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    stored = {new: stored[old] for old, new in renamed(model, list(stored)).items()} | dict(stored)
    places: dict[str, Place] = {}
    missing = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        spellings = (name, name.removeprefix(prefix), prefix + name)
        spelling = next((spelling for spelling in spellings if spelling in stored), None)
        if spelling is not None:
            places[name] = stored[spelling]
        elif name not in tied and tensor.is_meta and not _is_packed(name, packed):
            missing.append(name)
    return places, missing


def _is_packed(name: str, packed: Set[str]) -> bool:
    layer, _, leaf = name.rpartition(".")
    return leaf == "weight" and layer in packed
