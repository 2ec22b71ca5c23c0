"""Disk formats of compressed layers; the top of each file specifies its format."""

from __future__ import annotations

from compress.formats.awq import AWQ
from compress.formats.base import Format
from compress.formats.bitsandbytes import BitsAndBytes
from compress.formats.compressed_tensors import CompressedTensors
from compress.formats.dense import Dense
from compress.formats.gguf import GGUF
from compress.formats.gptq import GPTQ
from compress.formats.native import Native

_ALL: tuple[Format, ...] = (CompressedTensors(), Native(), GPTQ(), AWQ(), BitsAndBytes(), GGUF(), Dense())

FORMATS: dict[str, Format] = {format_.name: format_ for format_ in _ALL}
"""Every format by its name in a recipe."""
