"""Quantization: grids, scales, codes, bit streams, rounding."""
