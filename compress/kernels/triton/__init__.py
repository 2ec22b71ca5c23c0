"""GPU kernels in Triton: weights of every grid of up to 8 bits, times floats or quantized activations."""

from __future__ import annotations

from compress.kernels.triton.codes import TritonKernel

KERNEL = TritonKernel()
