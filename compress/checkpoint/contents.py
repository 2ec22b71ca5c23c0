"""What `inspect` shows that headers do not state: layers of format native, cache policies, and zeros among weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.formats import format_of
from compress.checkpoint.formats.native import Native
from compress.checkpoint.inspected import Inspection, Module
from compress.checkpoint.load import load
from compress.checkpoint.sources.stated import stated_quantization
from compress.checkpoint.sources.stored import Place, read_stored
from compress.errors import ModelError
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.models.caches.base import read_policy
from compress.models.terms import CACHE_KEY


def _cache_notes(config: Mapping[str, Any], folder: Path) -> list[str]:
    """The cache policies that compress stated, with the number of their attention modules."""
    try:
        texts = Counter(read_policy(values).text for values in (config.get(CACHE_KEY) or {}).values())
    except (ValueError, AttributeError) as error:
        raise ModelError(f"model: {folder / 'config.json'}: {CACHE_KEY} cannot be read ({error})") from error
    return [f"KV cache of {count} attention modules: {text}" for text, count in texts.items()]


Stored = Mapping[str, tuple[Path, Header]]
"""The file and the header of every tensor by its name."""


def with_contents(
    inspection: Inspection, stored: Stored, folder: Path, config: Mapping[str, Any], values: bool
) -> Inspection:
    """Add what only layers, policies and values say to an inspection of headers.

    Args:
        inspection: What the headers say.
        stored: The tensors of the checkpoint.
        folder: Its folder.
        config: Its config.json.
        values: Whether to read the weights, to count zeros.

    Raises:
        ModelError: for entries of config.json that cannot be read.
    """
    quantization = stated_quantization(config, folder)
    stated = quantization if isinstance(quantization, dict) else {}
    schemes = _own_schemes(stated, folder)
    modules = [_of_scheme(m, schemes[m.name]) if m.name in schemes else m for m in inspection.modules]
    zeros, notes = _zeros(folder, modules, stored, stated) if values else ({}, [])
    modules = [replace(module, zeros=zeros.get(module.name)) for module in modules]
    return replace(inspection, modules=modules, notes=[*_cache_notes(config, folder), *notes])


def _of_scheme(module: Module, scheme: LayerScheme) -> Module:
    codes = scheme.all_codes[0] if scheme.all_codes else None
    return replace(
        module,
        stored_as=", ".join([scheme.text, *(t.text for t in scheme.transforms)]),
        grid=scheme.grids[0].name if scheme.grids else "dense",
        shape=scheme.shape,
        group_size=codes.group_size if codes is not None else next((part.scale_groups for part in scheme.parts), None),
        parts=tuple(component.kind for component in (*scheme.parts, *scheme.transforms)),
        weights=scheme.shape[0] * scheme.shape[1],
    )


def _own_schemes(config: Mapping[str, Any], folder: Path) -> dict[str, LayerScheme]:
    """The schemes that format native states. Raises ModelError."""
    if config.get("quant_method") != Native.quant_method:
        return {}
    try:
        return Native().schemes(config, {}, {})
    except ValueError as error:
        raise ModelError(f"model: {folder / 'config.json'}: quantization_config cannot be read ({error})") from error


def _zeros(
    folder: Path, modules: list[Module], stored: Stored, config: Mapping[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """Return the share of zeros by module, and notes. Layers of formats that compress cannot decode have no share."""
    shares: dict[str, float] = {}
    for module in modules:
        name = f"{module.name}.weight"
        if module.grid == "dense" and name in stored:
            path, header = stored[name]
            weight = read_stored(Place(path, name, header))
            shares[module.name] = 1 - int(weight.count_nonzero()) / max(1, weight.numel())
    coded = [module for module in modules if module.grid != "dense"]
    if not coded or not (folder / "config.json").exists():
        return shares, []
    if format_of(config.get("quant_method")) is None:
        return shares, [f"the zeros of layers quantized by {config.get('quant_method')!r} cannot be counted"]
    return shares | _coded_zeros(load(folder)[0]), []


def _coded_zeros(model: nn.Module) -> dict[str, float]:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear)}
    return {n: 1 - int(m.weight.count_nonzero()) / (m.shape[0] * m.shape[1]) for n, m in layers.items()}
