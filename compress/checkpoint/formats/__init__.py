"""Disk formats of compressed layers; the top of each file specifies its format."""

from __future__ import annotations

from compress.checkpoint.formats.awq import AWQ
from compress.checkpoint.formats.base import Format
from compress.checkpoint.formats.bitsandbytes import BitsAndBytes
from compress.checkpoint.formats.compressed_tensors import CompressedTensors
from compress.checkpoint.formats.dense import Dense
from compress.checkpoint.formats.gguf import GGUF
from compress.checkpoint.formats.gptq import GPTQ
from compress.checkpoint.formats.native import Native

_ALL: tuple[Format, ...] = (CompressedTensors(), Native(), GPTQ(), AWQ(), BitsAndBytes(), GGUF(), Dense())

FORMATS: dict[str, Format] = {format_.name: format_ for format_ in _ALL}
"""Every format by its name in a recipe."""
