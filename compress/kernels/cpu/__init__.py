"""CPU kernels in C++: codes of every grid, packed sparse weights and dense floats, times floats or quantized inputs.

The shared library is built when the package is installed, for all instruction sets; the best one is chosen at run time.
Without it, plain torch computes the layers.
"""

from __future__ import annotations

from compress.kernels.cpu.codes import CodesKernel

KERNEL = CodesKernel()
