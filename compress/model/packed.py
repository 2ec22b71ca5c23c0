"""CompressedLinear: the one module that every method ends as."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.formats.base import Scheme
from compress.kernels import dispatch, reference
from compress.numerics.codes import Codes
from compress.numerics.grids import Grid
from compress.numerics.inputs import InputRounding
from compress.numerics.packed import PackedCodes

LINEARS = (nn.Linear, Conv1D)
"""The dense layers that compute x W + b; Conv1D stores W transposed, as [in, out]."""

PACKED = ("words", "scale", "zero", "group_index", "shared")
"""The tensors of packed codes, which a layer holds as buffers of the same names."""


INPUT_TENSORS = ("input_scale", "activation_scale", "outliers")
"""Tensors that say how inputs are treated, by the names that layers and schemes know them under."""


class CompressedLinear(nn.Module):
    """y = W q(x / s) + bias: a scale s per input channel, a rounding q of the inputs, and W dense or in packed codes.

    Weights are always seen as [out, in]. `transposed` remembers that the dense original stores [in, out]. `weight` is
    what x / s is multiplied by. activations: the grid of q, None where inputs are not rounded.
    """

    mask: Tensor | None
    dense: Tensor | None
    words: Tensor | None
    scale: Tensor | None
    zero: Tensor | None
    group_index: Tensor | None
    shared: Tensor | None
    input_scale: Tensor | None
    activation_scale: Tensor | None
    outliers: Tensor | None

    def __init__(self, weight: Tensor | PackedCodes, bias: Tensor | None, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.activations: Grid | None = None
        self.outlier_threshold: float | None = None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        for name in ("mask", "dense", *PACKED, *INPUT_TENSORS):
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
        for name in PACKED:
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
        return PackedCodes(**{name: getattr(self, name) for name in PACKED}, **self._packed_facts)

    def rescale_input(self, scale: Float[Tensor, " in"]) -> None:
        """Multiply the columns of the dense weight by `scale` and divide the inputs by it: the same function.

        For scales that cannot be folded into what writes the input. Kept in float32; factors of several calls multiply.
        """
        assert self.dense is not None, "codes cannot be rescaled; passes that do so come before quantizing ones"
        scale = scale.detach().to(self.dense.device, torch.float32)
        self.dense = (self.dense.float() * scale).to(self.dense.dtype)
        self.input_scale = scale if self.input_scale is None else self.input_scale * scale

    def absorb_input_scale(self) -> None:
        """Divide the columns of the weight by the scale of the inputs, which is dropped; codes become dense."""
        if self.input_scale is not None:
            weight = self.weight
            self.put((weight.float() / self.input_scale).to(weight.dtype))
            self.input_scale = None

    @property
    def rounding(self) -> InputRounding | None:
        """How inputs are rounded."""
        if self.activations is None:
            return None
        return InputRounding(self.activations, self.activation_scale, self.outlier_threshold, self.outliers)

    def round_inputs(self, rounding: InputRounding | None) -> None:
        """Round inputs from now on in this way, or not at all."""
        self.activations = None if rounding is None else rounding.grid
        self.activation_scale = None if rounding is None else rounding.scale
        self.outlier_threshold = None if rounding is None else rounding.threshold
        self.outliers = None if rounding is None else rounding.columns

    def input_tensors(self) -> dict[str, Tensor]:
        """The tensors that say how inputs are treated, those that there are."""
        return {name: t for name in INPUT_TENSORS if (t := getattr(self, name)) is not None}

    @property
    def scheme(self) -> Scheme | None:
        """How the layer is stored, or None while the weight is dense."""
        packed = self.packed
        if packed is None:
            return None
        return replace(
            Scheme.of(packed, self.activations),
            activation_scale="token" if self.activation_scale is None else "static",
            outlier_threshold=self.outlier_threshold,
            outlier_columns=self.outliers is not None,
            input_scaled=self.input_scale is not None,
        )

    def read(self, packed: PackedCodes, scheme: Scheme, tensors: Mapping[str, Tensor]) -> None:
        """Become the layer that was stored; tensors: `input_tensors` of the scheme by name."""
        self.put(packed)
        self.activations, self.outlier_threshold = scheme.activations, scheme.outlier_threshold
        for name in INPUT_TENSORS:
            setattr(self, name, tensors.get(name))

    def sha256(self) -> str | None:
        """A digest of codes, scales and all that is done to inputs; None while the weight is dense."""
        packed = self.packed
        if packed is None:
            return None
        digest = hashlib.sha256(f"{packed.sha256()} {self.outlier_threshold}".encode())
        for name, tensor in self.input_tensors().items():
            digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The weight that the layer multiplies by, dense, in the dtype of the dense weight or of the scales."""
        held = self.packed if self.dense is None else self.dense
        assert held is not None
        return self.weight_as(held.dtype)

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

    def transform(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """The inputs as the weight sees them: divided by their scale, in their own dtype."""
        return x if self.input_scale is None else (x / self.input_scale).to(x.dtype)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        x, rounding = self.transform(x), self.rounding
        if rounding is not None:
            x = rounding(x)
        if self.dense is not None:
            return nn.functional.linear(x, self.dense, self.bias)
        packed = self.packed
        assert packed is not None
        return dispatch.linear(x, packed, self.bias)

    def extra_repr(self) -> str:
        rows, width = self.shape
        kind = "dense" if self.dense is not None else f"{self._packed_facts['grid'].name}"
        return f"in={width}, out={rows}, {kind}" + (", masked" if self.mask is not None else "")


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
