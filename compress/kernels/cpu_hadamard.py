"""Hadamard transforms of inputs on the CPU, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.kernels.contract import Transform
from compress.kernels.cpu.codes import TYPES
from compress.kernels.cpu.rotations import has_steps, rotated


class HadamardKernel:
    """Transforms of float32 and bfloat16 inputs."""

    def supports(self, transform: Transform, x: Tensor) -> bool:
        if transform.kind != "hadamard" or x.dtype not in TYPES or not x.is_cpu:
            return False
        return has_steps(transform.scheme.block) and not (x.requires_grad and torch.is_grad_enabled())

    def transformed(self, transform: Transform, x: Tensor) -> Tensor:
        return rotated(x, transform.tensors()["hadamard_signs"], transform.scheme.block)


TRANSFORM = HadamardKernel()
