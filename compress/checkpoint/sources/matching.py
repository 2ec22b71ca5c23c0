"""Find the tensors of a model among those of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from compress.checkpoint.sources.stored import Place
from compress.errors import ModelError
from compress.models.experts import renamed

COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")
"""Tensors of old files that models compute themselves (transformers, _adjust_missing_and_unexpected_keys)."""
APART = ("pooler", "seq_relationship")
"""Modules of encoders for another task than that of a class without them."""
MOST = 5  # names in a message


def match(model: nn.Module, stored: Mapping[str, Place], packed: Set[str] = frozenset()) -> dict[str, Place] | None:
    """Find the stored tensor of every tensor of a model.

    Args:
        packed: linears whose weight is stored in another form.

    Returns:
        Places by name; None when a shape differs, or a name cannot be resolved by renaming.

    Raises:
        ModelError: for weights that are integers or 8-bit floats, and for tied weights with different values.
    """
    places, missing = _places(model, stored, packed)
    if missing:
        return None
    state = model.state_dict(keep_vars=True)
    dense = {name: place for name, place in places.items() if not _is_packed(name, packed)}
    for name, (path, key, header, _) in dense.items():
        if state[name].is_floating_point() and not (header.floating and header.bits >= 16):
            raise ModelError(
                f"model: {key} in {path} holds {header.dtype}, not floats of 16 bits or more, and it has no scale, or "
                "quantization_config of config.json does not describe it; fetch the files again"
            )
    if any(place.header.shape != tuple(state[name].shape) for name, place in dense.items()):
        return None
    _check_tied(model, dense)
    return places


def _check_tied(model: nn.Module, places: Mapping[str, Place]) -> None:
    """Raise ModelError for tied weights that are stored twice with different values; transformers does not tie them."""
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if target not in places or source not in places or places[target] == places[source]:
            continue
        tied = places[target].read(), places[source].read()
        dtype = min((tensor.dtype for tensor in tied), key=lambda dtype: dtype.itemsize)
        if not torch.equal(tied[0].to(dtype), tied[1].to(dtype)):
            raise ModelError(
                f"model: {source} and {target} are one weight by config.json, but {places[target].path} has different "
                "values for them, and transformers does not tie them then; write tie_word_embeddings: false into "
                f"config.json, or remove {places[target].key} from the file"
            )


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


@dataclass(frozen=True)
class Undeclared:
    """Names of stored tensors that the class of a model does not declare.

    Attributes:
        parts: of modules that the class does not have, such as layers for the prediction of several tokens, other heads
            and poolers.
        computed: that the model computes itself, or that transformers ignores in modules that the class has.
    """

    parts: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """A note on the tensors that are left out."""
        if not self.computed:
            return []
        more = f" and {len(self.computed) - MOST} more" if len(self.computed) > MOST else ""
        return [f"{', '.join(self.computed[:MOST])}{more} are left out: the model computes them, or ignores them"]


def undeclared(model: PreTrainedModel, folder: Path, names: Iterable[str]) -> Undeclared:
    """Divide the names of stored tensors that are not read into a model.

    Raises:
        ModelError: for tensors of modules that the class has, and of numbered blocks that it does not expect.
    """
    expected = model._keys_to_ignore_on_load_unexpected or ()
    buffers = {name for name, _ in model.named_buffers()}
    modules, prefix = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
    unread, computed, parts = [], [], []
    for name, new in sorted(renamed(model, list(names)).items()):
        spellings = (new, new.removeprefix(prefix), prefix + new)
        heads = (new.split(".")[0], new.removeprefix(prefix).split(".")[0], prefix + new.split(".")[0])
        spelling = next((s for s, head in zip(spellings, heads, strict=True) if head in modules), new)
        part = _first_absent(spelling, modules)
        is_expected = any(re.search(pattern, new) for pattern in expected)
        if any(s in buffers for s in spellings) or any(re.search(pattern, new) for pattern in COMPUTED):
            computed.append(name)
        elif part != spelling and (is_expected or "." not in part or part.rpartition(".")[2] in APART):
            parts.append(name)
        else:
            (computed if is_expected else unread).append(name)
    if unread:
        more = f" and {len(unread) - MOST} more" if len(unread) > MOST else ""
        raise ModelError(
            f"model: {folder} holds tensors that are not read: {', '.join(unread[:MOST])}{more}; "
            "its config.json describes another model: fetch both again"
        )
    return Undeclared(tuple(parts), tuple(computed))


def _first_absent(name: str, modules: Set[str]) -> str:
    """Return the beginning of the name of a tensor that ends with the first module that does not exist."""
    parts = name.split(".")
    return next((part for i in range(1, len(parts)) if (part := ".".join(parts[:i])) not in modules), name)


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
