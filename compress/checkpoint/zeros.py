"""The zeros among the weights of a checkpoint, which `inspect` counts on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.formats import format_of
from compress.checkpoint.inspected import Inspection, Module
from compress.checkpoint.load import load
from compress.checkpoint.sources.stated import stated_quantization
from compress.checkpoint.sources.stored import Place, read_stored
from compress.layers.linear import CompressedLinear

StoredHeaders = Mapping[str, tuple[Path, Header]]
"""The file and the header of every tensor by its name."""


def with_zeros(inspection: Inspection, stored: StoredHeaders, folder: Path, config: Mapping[str, Any]) -> Inspection:
    """Read the weights, and add the share of zeros of every module to an inspection.

    Layers of formats that compress cannot decode have no share; a note says so.

    Args:
        inspection: what headers and config.json say.
        stored: tensors of the checkpoint.
        folder: folder of the checkpoint.
        config: its config.json.

    Raises:
        ModelError: for a checkpoint that cannot be loaded.
    """
    shares: dict[str, float] = {}
    for module in inspection.modules:
        name = f"{module.name}.weight"
        if module.grid == "dense" and name in stored:
            path, header = stored[name]
            weight = read_stored(Place(path, name, header))
            shares[module.name] = 1 - int(weight.count_nonzero()) / max(1, weight.numel())
    coded = any(module.grid != "dense" for module in inspection.modules)
    if not coded or not (folder / "config.json").exists():
        return _shared(inspection, shares)
    quantization = stated_quantization(config, folder)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if format_of(method) is None:
        note = f"the zeros of layers quantized by {method!r} cannot be counted"
        return _shared(replace(inspection, notes=[*inspection.notes, note]), shares)
    return _shared(inspection, shares | _coded_zeros(folder))


def _shared(inspection: Inspection, shares: Mapping[str, float]) -> Inspection:
    modules: list[Module] = [replace(module, zeros=shares.get(module.name)) for module in inspection.modules]
    return replace(inspection, modules=modules)


def _coded_zeros(folder: Path) -> dict[str, float]:
    model, _ = load(folder)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear)}
    return {n: 1 - int(m.weight.count_nonzero()) / (m.shape[0] * m.shape[1]) for n, m in layers.items()}
