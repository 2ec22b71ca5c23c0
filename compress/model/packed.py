"""CompressedLinear: the one module that every method ends as."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.kernels import dispatch, reference
from compress.numerics.codes import Codes
from compress.numerics.grids import Grid
from compress.numerics.packed import PackedCodes

LINEARS = (nn.Linear, Conv1D)
"""The dense layers that compute x W + b; Conv1D stores W transposed, as [in, out]."""


class CompressedLinear(nn.Module):
    """y = W q(x) + bias, with W dense (perhaps masked) or packed codes, and q an optional activation grid.

    Weights are always seen as [out, in]. `transposed` remembers that the dense original stores [in, out].
    """

    mask: Tensor | None
    dense: Tensor | None
    words: Tensor | None
    scale: Tensor | None
    zero: Tensor | None
    group_index: Tensor | None

    def __init__(self, weight: Tensor | PackedCodes, bias: Tensor | None, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.activations: Grid | None = None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("mask", None)
        for name in ("dense", "words", "scale", "zero", "group_index"):
            self.register_buffer(name, None)
        self._packed_facts: dict[str, Any] = {}
        self.put(weight)

    @classmethod
    def of(cls, module: nn.Module) -> CompressedLinear:
        """The same function as a dense layer, as a CompressedLinear; the weight is shared, not copied."""
        if isinstance(module, CompressedLinear):
            return module
        assert isinstance(module, LINEARS)
        transposed = isinstance(module, Conv1D)
        weight = module.weight.detach()
        bias = None if module.bias is None else module.bias.detach()
        return cls(weight.T if transposed else weight, bias, transposed)

    def put(self, weight: Tensor | Codes | PackedCodes, mask: Bool[Tensor, "out in"] | None = None) -> None:
        """Replace the weight: dense [out, in] or codes. A mask once set stays unless another is given."""
        if mask is not None:
            self.mask = mask
        packed = PackedCodes.of(weight) if isinstance(weight, Codes) else weight
        self.dense = packed if isinstance(packed, Tensor) else None
        for name in ("words", "scale", "zero", "group_index"):
            setattr(self, name, None if isinstance(packed, Tensor) else getattr(packed, name))
        if isinstance(packed, Tensor):
            self._packed_facts = {}
        else:
            self._packed_facts = {"grid": packed.grid, "group_size": packed.group_size, "shape": packed.shape}

    @property
    def packed(self) -> PackedCodes | None:
        """The packed codes, or None while the weight is dense."""
        if self.words is None or self.scale is None:
            return None
        return PackedCodes(self.words, self.scale, self.zero, group_index=self.group_index, **self._packed_facts)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The weight that the layer multiplies by, dense, in the dtype of the dense weight or of the scales."""
        stored = self.scale if self.dense is None else self.dense
        assert stored is not None
        return self.weight_as(stored.dtype)

    def weight_as(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """The weight computed in `dtype`."""
        if self.dense is not None:
            return self.dense.to(dtype)
        packed = self.packed
        assert packed is not None
        return reference.dense_weight(packed, dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        if self.dense is None:
            return self._packed_facts["shape"]
        return self.dense.shape[0], self.dense.shape[1]

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        if self.activations is not None:
            x = round_tokens(x, self.activations)
        if self.dense is not None:
            return nn.functional.linear(x, self.dense, self.bias)
        packed = self.packed
        assert packed is not None
        return dispatch.linear(x, packed, self.bias)

    def extra_repr(self) -> str:
        rows, width = self.shape
        kind = "dense" if self.dense is not None else f"{self._packed_facts['grid'].name}"
        return f"in={width}, out={rows}, {kind}" + (", masked" if self.mask is not None else "")


def round_tokens(x: Float[Tensor, "*batch in"], grid: Grid) -> Float[Tensor, "*batch in"]:
    """Activations rounded to a symmetric grid with one scale per token, found at run time (ZeroQuant, section 3.1)."""
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    scale, _ = grid.fit(low, high, True, x.dtype)
    return grid.decode(grid.encode(x, scale, None), scale, None)


def linears(module: nn.Module) -> dict[str, nn.Module]:
    """Every linear below a module by its name, in the order of definition, dense and compressed alike."""
    return {name: child for name, child in module.named_modules() if isinstance(child, (*LINEARS, CompressedLinear))}


def replace_linear(root: nn.Module, name: str) -> CompressedLinear:
    """Put a CompressedLinear in place of the linear `name` below `root` (nothing changes if it is one already)."""
    old = root.get_submodule(name)
    new = CompressedLinear.of(old)
    if new is not old:
        parent, _, leaf = name.rpartition(".")
        setattr(root.get_submodule(parent), leaf, new)
    return new
