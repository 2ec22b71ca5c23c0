"""Probe runs of one block: change one output (scale, shift or equalize it) and record the inputs of all readers.

In all runs, the output of each linear is centred over the tokens and shifted by noise of the same size, equal in all
runs, so that no channel is silent (after a ReLU, half of the channels may be zero on a short text). Runs are in
float32; a block in another dtype is copied.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.layers.linear import LINEARS, CompressedLinear, linears
from compress.models.experts import exercised

Forward = Callable[[nn.Module], Tensor]
"""One forward pass of a block on fixed inputs, cast to the dtype of the block's parameters: block -> hidden states."""

Change = Callable[[Tensor], Tensor]
"""A change that a run applies to an input or an output of a module."""


def readers_of(block: nn.Module) -> dict[str, nn.Module]:
    """Return all modules that multiply their input by a matrix [out, in]: linears, and routers with a weight matrix."""
    modules = linears(block)
    for name, module in block.named_modules():
        weight = module._parameters.get("weight")
        if name not in modules and weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            modules[name] = module
    return modules


def norms_of(block: nn.Module) -> dict[str, nn.Module]:
    """Return all modules with a one-dimensional weight, which may scale their output per channel."""
    modules = block.named_modules()
    return {n: m for n, m in modules if (w := m._parameters.get("weight")) is not None and w.dim() == 1}


def width_in(module: nn.Module) -> int:
    """Return the number of input columns of a linear or a router."""
    if isinstance(module, (*LINEARS, CompressedLinear)):
        return CompressedLinear.of(module).shape[1]
    return module.get_parameter("weight").shape[1]


def width_out(module: nn.Module) -> int:
    """Return the number of output channels of a linear or a norm."""
    if isinstance(module, (*LINEARS, CompressedLinear)):
        return CompressedLinear.of(module).shape[0]
    return module.get_parameter("weight").shape[0]


@contextmanager
def in_float32(block: nn.Module):
    """Yield the block itself if it is in float32, else a float32 copy; all experts run on all tokens in the context."""
    floating = (t for t in (*block.parameters(), *block.buffers()) if t.is_floating_point())
    proof = block if all(t.dtype == torch.float32 for t in floating) else copy.deepcopy(block).to(torch.float32)
    with torch.no_grad(), exercised(proof):
        yield proof


class Probe:
    """A block in float32 and its forward pass, run with changes.

    Attributes:
        readers: linears and routers of the block by name.
        norms: norms of the block by name.
        base: input of each reader in the run without changes, [tokens, in].
        ran: names of the readers that received a token in that run.
    """

    def __init__(self, block: nn.Module, forward: Forward) -> None:
        self.block, self._forward = block, forward
        self.readers, self.norms = readers_of(block), norms_of(block)
        self.linears = linears(block)
        self.base: dict[str, Tensor] = {}
        self._last_copied: tuple[Tensor, int | None, Tensor] | None = None
        self.output = self.run()
        self.base = self.inputs
        self.ran = frozenset(self.base)

    def run(self, outputs: Mapping[str, Change] | None = None, inputs: Mapping[str, Change] | None = None) -> Tensor:
        """Run the block with changed outputs and inputs of some modules and return its output.

        Afterwards `self.inputs` holds the input of every reader before its own change: [tokens, in]. Readers that read
        a tensor one after the other share its copy.
        """
        outputs, inputs = outputs or {}, inputs or {}
        self._last_copied = None
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
            output = self._forward(self.block)
        self._last_copied = None
        return output

    def _record(self, name: str, change: Change | None) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            rows = args[0].reshape(-1, args[0].shape[-1])
            if rows.shape[0] and name not in self.inputs:
                self.inputs[name] = self._copied(args[0], rows)
            return None if change is None else (change(args[0]), *args[1:])

        return hook

    def _copied(self, x: Tensor, rows: Float[Tensor, "tokens in"]) -> Float[Tensor, "tokens in"]:
        """Return a copy of the rows of an input; the last one, if it is of the same, unchanged tensor."""
        version = None if x.is_inference() else x._version
        last = self._last_copied
        if last is None or version is None or last[0] is not x or last[1] != version:
            last = self._last_copied = x, version, rows.clone()
        return last[2]

    def reached(self, names: Iterable[str] | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (plain input, input in the last run) of each reader with the same number of tokens in both runs."""
        common_names = [name for name in (names or self.base) if name in self.inputs and name in self.base]
        pairs = {name: (self.base[name], self.inputs[name]) for name in common_names}
        return {name: (x, y) for name, (x, y) in pairs.items() if x.shape == y.shape}


def _shift(seed: int) -> Callable[..., Tensor]:
    """Return a hook that centers each channel and adds noise of the size of the output, drawn from a seed."""

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
