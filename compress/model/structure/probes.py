"""Runs of one block that differ in one thing: an output is scaled, shifted or made equal, and inputs are recorded.

Every linear's output is centred over the tokens and shifted by noise of its own size, the same in all runs, so that no
channel is silent (behind a ReLU, half of the channels may be zero on a short text). Runs are made in float32, on a
copy where the block is not.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compress.model.linear import LINEARS, CompressedLinear, linears
from compress.model.open.experts import exercised

Forward = Callable[[nn.Module], Tensor]
"""One forward pass of a block on fixed inputs, cast to the dtype of the block's parameters: block -> hidden states."""

Change = Callable[[Tensor], Tensor]
"""What a run does to the tensor that passes a place."""


def readers_of(block: nn.Module) -> dict[str, nn.Module]:
    """All modules that multiply their input by a matrix [out, in]: linears, and routers, which hold one themselves."""
    found = linears(block)
    for name, module in block.named_modules():
        weight = module._parameters.get("weight")
        if name not in found and weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            found[name] = module
    return found


def norms_of(block: nn.Module) -> dict[str, nn.Module]:
    """All modules with a one-dimensional weight: they may scale their output channel by channel."""
    named = block.named_modules()
    return {n: m for n, m in named if (w := m._parameters.get("weight")) is not None and w.dim() == 1}


def width_in(module: nn.Module) -> int:
    """How many input columns a linear or a router has."""
    if isinstance(module, (*LINEARS, CompressedLinear)):
        return CompressedLinear.of(module).shape[1]
    return module.get_parameter("weight").shape[1]


def width_out(module: nn.Module) -> int:
    """How many channels a linear or a norm writes."""
    if isinstance(module, (*LINEARS, CompressedLinear)):
        return CompressedLinear.of(module).shape[0]
    return module.get_parameter("weight").shape[0]


@contextmanager
def in_float32(block: nn.Module):
    """The block itself when it is in float32, else a copy that is; experts are all exercised meanwhile."""
    floating = (t for t in (*block.parameters(), *block.buffers()) if t.is_floating_point())
    proof = block if all(t.dtype == torch.float32 for t in floating) else copy.deepcopy(block).to(torch.float32)
    with torch.no_grad(), exercised(proof):
        yield proof


class Probe:
    """A block in float32 and its forward pass, run with changes.

    readers, norms: its modules by name. ran: the readers that saw a token in a plain run.
    """

    def __init__(self, block: nn.Module, forward: Forward) -> None:
        self.block, self._forward = block, forward
        self.readers, self.norms = readers_of(block), norms_of(block)
        self.linears = linears(block)
        self.base: dict[str, Tensor] = {}
        self.output = self.run()
        self.base = self.inputs
        self.ran = frozenset(self.base)

    def run(self, outputs: Mapping[str, Change] | None = None, inputs: Mapping[str, Change] | None = None) -> Tensor:
        """The block's output with the outputs and the inputs of some modules changed.

        `self.inputs` holds, afterwards, what reached every reader before its own change: [tokens, in].
        """
        outputs, inputs = outputs or {}, inputs or {}
        self.inputs: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for name, module in self.readers.items():
                handle = module.register_forward_pre_hook(self._record(name, inputs.get(name)))
                stack.callback(handle.remove)
            for name, module in self.linears.items():
                handle = module.register_forward_hook(_shift(zlib.crc32(name.encode())))
                stack.callback(handle.remove)
            for name, change in outputs.items():
                handle = self.block.get_submodule(name).register_forward_hook(_changed(change))
                stack.callback(handle.remove)
            return self._forward(self.block)

    def _record(self, name: str, change: Change | None) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            rows = args[0].reshape(-1, args[0].shape[-1])
            if rows.shape[0]:
                self.inputs.setdefault(name, rows.clone())
            return None if change is None else (change(args[0]), *args[1:])

        return hook

    def reached(self, names: Iterable[str] | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """(input before, input in the last run) of every reader with the same number of tokens in both."""
        both = [name for name in (names or self.base) if name in self.inputs and name in self.base]
        pairs = {name: (self.base[name], self.inputs[name]) for name in both}
        return {name: (x, y) for name, (x, y) in pairs.items() if x.shape == y.shape}


def _shift(seed: int) -> Callable[..., Tensor]:
    """Centre every channel, and add noise of the size of the output, drawn from a seed."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
        output = output - output.mean(tuple(range(output.dim() - 1)), keepdim=True)
        size = output.square().mean().sqrt()
        return output + noise * torch.where(size > 0, size, torch.ones_like(size))

    return hook


def _changed(change: Change) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else output

    return hook
