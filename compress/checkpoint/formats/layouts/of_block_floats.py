"""The layouts of compressed-tensors for block floats."""

from __future__ import annotations

from compress.checkpoint.formats.layouts.layout import Layout
from compress.checkpoint.formats.layouts.mxfp4_pack_quantized import MXFP4PackQuantized
from compress.checkpoint.formats.layouts.mxfp8_quantized import MXFP8Quantized
from compress.checkpoint.formats.layouts.nvfp4_pack_quantized import NVFP4PackQuantized

BLOCK_FLOATS: tuple[Layout, ...] = (MXFP4PackQuantized(), NVFP4PackQuantized(), MXFP8Quantized())
"""Each stores one grid, for weights and inputs; transformers dequantizes them in bfloat16."""
