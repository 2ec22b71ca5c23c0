"""Snapshots: the model between two segments of a run, written to files and restored exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.checkpoint.codec import ShardEntry
from compress.checkpoint.exact import read_exact, restore_outside, restore_state
from compress.checkpoint.opened import OpenModel, Weights
from compress.checkpoint.writer import OUTSIDE
from compress.models.reshape.reconfigure import build, replace_in_place, shapes, sketch
from compress.models.structure.blocks import find_blocks
from compress.models.structure.ends import tie


@dataclass
class Snapshot:
    """The model after a segment of a run; it holds some of the blocks until it is complete.

    Attributes:
        segment: index of the segment.
        parts: shards of exact states by block name, and of `OUTSIDE`.
        complete: all shards are written.
        config: configuration of the model.
        results: results of layers of all segments so far, by block name.
        journal: journal entries of all segments so far.
    """

    segment: int
    parts: dict[str, ShardEntry] = field(default_factory=dict)
    complete: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    journal: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot of `dataclasses.asdict` values. Raises TypeError or KeyError."""
        parts = {name: ShardEntry(**part) for name, part in values["parts"].items()}
        return cls(**{**values, "parts": parts})

    def is_intact(self, folder: Path) -> bool:
        """Return whether the snapshot is complete and all its files are unchanged."""
        return self.complete and all(part.is_unchanged(folder) for part in self.parts.values())


def read_snapshot(snapshot: Snapshot, folder: Path, opened: OpenModel) -> bool:
    """Restore the whole model in memory; return whether its shape changes."""
    is_reshaped = _as_json(opened.config.to_dict()) != _as_json(snapshot.config)
    if is_reshaped:
        replace_in_place(opened.model, _placeholder_model(opened, snapshot.config))
        opened.blocks = find_blocks(opened.model)
    for block in opened.blocks:
        part = snapshot.parts[block.name]
        restore_state(block.module, read_exact(folder / part.file, opened.device), part.state)
    outside = snapshot.parts[OUTSIDE]
    restore_outside(opened.model, read_exact(folder / outside.file, opened.device), outside.state)
    tie(opened.model)
    opened.weights = Weights(reading=opened.weights.reading)
    return is_reshaped


def _placeholder_model(opened: OpenModel, values: Mapping[str, Any]) -> nn.Module:
    """Return the model of a configuration, with placeholders for weights."""
    config = type(opened.config).from_dict(dict(values))
    shape_model = sketch(opened.model, config)
    assert shape_model is not None, "the configuration belongs to a model that existed"
    placeholder = torch.empty((), dtype=opened.dtype, device=opened.device)
    return build(opened.model, config, {name: placeholder.expand(shape) for name, shape in shapes(shape_model).items()})


def _as_json(config: Mapping[str, Any]) -> Any:
    """Return a configuration after a round trip through JSON."""
    return json.loads(json.dumps(config))
