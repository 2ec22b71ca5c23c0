"""What `inspect` shows that config.json of compress states: layers of format native, and cache policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.checkpoint.formats.native import Native
from compress.checkpoint.inspected import Inspection, Module
from compress.checkpoint.sources.stated import stated_quantization
from compress.errors import ModelError
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


def with_contents(inspection: Inspection, folder: Path, config: Mapping[str, Any]) -> Inspection:
    """Add what only layers and policies say to an inspection of headers.

    Args:
        inspection: what the headers say.
        folder: folder of the checkpoint.
        config: its config.json.

    Raises:
        ModelError: for entries of config.json that cannot be read.
    """
    quantization = stated_quantization(config, folder)
    schemes = _own_schemes(quantization if isinstance(quantization, dict) else {}, folder)
    modules = [_of_scheme(m, schemes[m.name]) if m.name in schemes else m for m in inspection.modules]
    return replace(inspection, modules=modules, notes=[*inspection.notes, *_cache_notes(config, folder)])


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
