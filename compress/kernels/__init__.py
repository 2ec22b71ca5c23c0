"""Kernels of compressed layers: `dispatch` selects a kernel for each call, `reference` is their oracle."""
