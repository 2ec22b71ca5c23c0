"""GPU kernels in Triton: weights of every grid of up to 8 bits, times floats or rounded inputs."""

from __future__ import annotations

from compress.kernels.triton.codes import CodesKernel

KERNEL = CodesKernel()
