"""Disk formats of compressed layers; the top of each file specifies its format."""

from __future__ import annotations

from compress.formats.base import Format
from compress.formats.compressed_tensors import CompressedTensors
from compress.formats.dense import Dense
from compress.formats.gguf import GGUF
from compress.formats.native import Native

FORMATS: dict[str, Format] = {format_.name: format_ for format_ in (CompressedTensors(), Dense(), GGUF(), Native())}
"""Every format by its name in a recipe."""
