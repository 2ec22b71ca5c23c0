"""Find the tensors of a model among those of its files."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from torch import nn

from compress.checkpoint.sources.stored import headers_of
from compress.errors import ModelError
from compress.models.experts import renamed


def match(
    model: nn.Module, stored: dict[str, tuple[Path, str]], present: Set[str] = frozenset()
) -> dict[str, tuple[Path, str]] | None:
    """Model tensor name -> stored tensor, or None when a shape differs or a name cannot be resolved by renaming.

    present: linears whose weight is stored in another form. Raises ModelError for integers and 8-bit floats.
    """
    found, missing = _places(model, stored, present)
    if missing:
        return None
    wanted = model.state_dict(keep_vars=True)
    plain = {name: place for name, place in found.items() if not _is_packed(name, present)}
    headers = headers_of(plain)
    for name, header in headers.items():
        if wanted[name].is_floating_point() and not (header.floating and header.bits >= 16):
            path, key = plain[name]
            raise ModelError(
                f"model: {key} in {path} holds {header.dtype}, not floats of 16 bits or more, and quantization_config "
                "of config.json does not describe it; fetch the files again"
            )
    return found if all(header.shape == tuple(wanted[name].shape) for name, header in headers.items()) else None


def _places(
    model: nn.Module, stored: dict[str, tuple[Path, str]], present: Set[str]
) -> tuple[dict[str, tuple[Path, str]], list[str]]:
    """(model tensor name -> stored tensor, the names of tensors that are not stored)."""
    wanted = dict(model.state_dict(keep_vars=True))
    prefix = getattr(model, "base_model_prefix", "") + "."
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    stored = {new: stored[old] for old, new in renamed(model, list(stored)).items()} | stored
    found: dict[str, tuple[Path, str]] = {}
    missing = []
    for name in wanted:
        for spelling in (name, name.removeprefix(prefix), prefix + name):
            if spelling in stored:
                found[name] = stored[spelling]
                break
        else:
            if name not in tied and wanted[name].is_meta and not _is_packed(name, present):
                missing.append(name)
    return found, missing


def _is_packed(name: str, present: Set[str]) -> bool:
    layer, _, leaf = name.rpartition(".")
    return leaf == "weight" and layer in present


def lacking(
    model: nn.Module, folder: Path, stored: dict[str, tuple[Path, str]], present: Set[str] = frozenset()
) -> ModelError:
    """The error for a model that `match` does not find in the files of its folder."""
    found, missing = _places(model, stored, present)
    if missing:
        return ModelError(
            f"model: {folder} lacks tensors of its model; write it again ({len(missing)} are missing, the first is "
            f"{missing[0]})"
        )
    wanted = model.state_dict(keep_vars=True)
    for name, header in headers_of(found).items():
        if not _is_packed(name, present) and header.shape != tuple(wanted[name].shape):
            here, there = list(header.shape), list(wanted[name].shape)
            return ModelError(f"model: {name} is {here} in {found[name][0]}, but {there} by its config.json")
    raise AssertionError("match finds this model")
