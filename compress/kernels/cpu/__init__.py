"""CPU kernels in C++ for codes of integer grids: products with floats, and with inputs rounded to int8.

The shared library is built when the package is installed, for all instruction sets; the best one is chosen at run time.
Without it, plain torch computes the layers.
"""

from __future__ import annotations

from compress.kernels.cpu.codes import CodesKernel

KERNEL = CodesKernel()
