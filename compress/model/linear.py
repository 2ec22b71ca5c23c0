"""CompressedLinear: the one module that every method ends as."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.errors import NumericError
from compress.formats.base import Scheme
from compress.kernels import dispatch, reference
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import Grid
from compress.numerics.quant.inputs import InputRounding
from compress.numerics.quant.packed import PackedCodes
from compress.numerics.sparse.positions import Kept, SparseWeight, Sparsity

LINEARS = (nn.Linear, Conv1D)
"""The dense layers that compute x W + b; Conv1D stores W transposed, as [in, out]."""

PACKED = ("words", "scale", "zero", "group_index", "shared")
"""The tensors of packed codes, which a layer holds as buffers of the same names."""


INPUT_TENSORS = ("input_permutation", "input_scale", "activation_scale", "outliers")
"""Tensors that say how inputs are treated, by the names that layers and schemes know them under."""


Held = Tensor | PackedCodes | SparseWeight
"""A weight as a layer holds it: dense, in codes (of all weights or of kept ones), or by its kept weights alone."""


class CompressedLinear(nn.Module):
    """y = W q(x[p] / s) + bias: inputs in an order p, divided by scales s, rounded by q; W dense, in codes, or sparse.

    Weights are always seen as [out, in]. `transposed` remembers that the dense original stores [in, out]. `weight` is
    what x[p] / s is multiplied by: its columns, the scales and all else that is said of inputs have the order p, where
    there is one. activations: the grid of q, None where inputs are not rounded. A mask says which weights pruning has
    kept, however the weight is held; it is packed.
    """

    kept: Tensor | None
    dense: Tensor | None
    values: Tensor | None
    words: Tensor | None
    scale: Tensor | None
    zero: Tensor | None
    group_index: Tensor | None
    shared: Tensor | None
    input_permutation: Tensor | None
    input_scale: Tensor | None
    activation_scale: Tensor | None
    outliers: Tensor | None

    def __init__(self, weight: Tensor | PackedCodes, bias: Tensor | None, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.activations: Grid | None = None
        self.outlier_threshold: float | None = None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        for name in ("kept", "dense", "values", *PACKED, *INPUT_TENSORS):
            self.register_buffer(name, None)
        self._facts: dict[str, Any] = {}
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

    def put(self, weight: Held | Codes, mask: Bool[Tensor, "out in"] | None = None) -> None:
        """Replace the weight [out, in]. A mask once set stays unless another is given, or kept weights bring theirs."""
        held = PackedCodes.of(weight) if isinstance(weight, Codes) else weight
        own = None if isinstance(held, Tensor) else held.kept
        kept = own
        if own is None:
            kept = self.positions if mask is None else Kept.of(mask)
        shape = held.shape[0], held.shape[1]
        assert kept is None or kept.shape == shape, "the mask is that of another weight"
        self._facts = {"shape": shape, "alone": own is not None, "sparsity": None if kept is None else kept.sparsity}
        self.kept = None if kept is None else kept.words
        self.dense = held if isinstance(held, Tensor) else None
        self.values = held.values if isinstance(held, SparseWeight) else None
        for name in PACKED:
            setattr(self, name, getattr(held, name) if isinstance(held, PackedCodes) else None)
        if isinstance(held, PackedCodes):
            self._facts |= {"grid": held.grid, "group_size": held.group_size}

    @property
    def held(self) -> Held:
        """The weight as it is held."""
        if self.dense is not None:
            return self.dense
        kept = self.positions if self._facts["alone"] else None
        if self.values is not None:
            assert kept is not None
            return SparseWeight(self.values, kept)
        facts = {name: self._facts[name] for name in ("grid", "group_size", "shape")}
        return PackedCodes(**{name: getattr(self, name) for name in PACKED}, **facts, kept=kept)

    @property
    def packed(self) -> PackedCodes | None:
        """The packed codes, or None while the weight is in floats."""
        return held if isinstance(held := self.held, PackedCodes) else None

    @property
    def positions(self) -> Kept | None:
        """The mask as it is held."""
        return None if self.kept is None else Kept(self.kept, self._facts["sparsity"], self.shape)

    @property
    def mask(self) -> Bool[Tensor, "out in"] | None:
        """True where pruning has kept a weight, zero or not; None where nothing was pruned."""
        positions = self.positions
        return None if positions is None else positions.mask()

    def hold_kept(self, sparsity: Sparsity) -> None:
        """Hold the kept weights alone from now on; sparsity: one of those that the mask has (`sparsities`).

        Raises NumericError when a weight outside of the mask is not zero.
        """
        mask, held, before = self.mask, self.held, int(self.weight.count_nonzero())
        assert mask is not None
        assert not self._facts["alone"]
        kept = Kept.of(mask, sparsity.n_of_m)
        self.put(held.only(kept) if isinstance(held, PackedCodes) else SparseWeight.of(self.weight, kept))
        if int(self.weight.count_nonzero()) != before:
            raise NumericError("weights that were pruned are no longer zero")

    def rescale_input(self, scale: Float[Tensor, " in"]) -> None:
        """Multiply the columns of the dense weight by `scale` and divide the inputs by it: the same function.

        For scales that cannot be folded into what writes the input. Kept in float32; factors of several calls multiply.
        """
        assert self.packed is None, "codes cannot be rescaled; passes that do so come before quantizing ones"
        weight = self.weight
        scale = scale.detach().to(weight.device, torch.float32)
        self.put((weight.float() * scale).to(weight.dtype))
        self.input_scale = scale if self.input_scale is None else self.input_scale * scale

    def permute_input(self, order: Int[Tensor, " in"]) -> None:
        """Put the columns of the dense weight, and inputs, in another order, number order[j] at j: the same function.

        For permutations that cannot be folded into what writes the input; those of several calls are combined.
        """
        assert self.packed is None, "codes cannot be permuted; passes that do so come before quantizing ones"
        before = self.input_permutation
        self._order_columns(order)
        self.input_permutation = (order if before is None else before[order]).to(torch.int32)

    def absorb_input_permutation(self) -> None:
        """Put the columns of the weight back to the order of the inputs; codes become dense, a mask moves along."""
        if self.input_permutation is not None:
            self._order_columns(self.input_permutation.argsort())
            self.input_permutation = None

    def _order_columns(self, order: Int[Tensor, " in"]) -> None:
        """Put the columns, and what belongs to each, in another order."""
        mask = self.mask
        self.put(self.weight[:, order].contiguous(), None if mask is None else mask[:, order])
        for name in ("input_scale", "outliers"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor[order])

    def absorb_input_scale(self) -> None:
        """Divide the columns of the weight by the scale of the inputs, which is dropped; codes become dense."""
        if self.input_scale is not None:
            weight = self.weight
            self.put((weight.float() / self.input_scale).to(weight.dtype))
            self.input_scale = None

    def absorb_inputs(self) -> None:
        """Take back all that is done to inputs but their rounding: the same function, its weight dense."""
        self.absorb_input_permutation()
        self.absorb_input_scale()

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
        held = self.held
        if isinstance(held, Tensor):
            return None
        return replace(
            Scheme.of(held, self.activations),
            activation_scale="token" if self.activation_scale is None else "static",
            outlier_threshold=self.outlier_threshold,
            outlier_columns=self.outliers is not None,
            input_scaled=self.input_scale is not None,
            input_permuted=self.input_permutation is not None,
        )

    def read(self, weight: PackedCodes | SparseWeight, scheme: Scheme, tensors: Mapping[str, Tensor]) -> None:
        """Become the layer that was stored; tensors: `input_tensors` of the scheme by name."""
        self.put(weight)
        self.activations, self.outlier_threshold = scheme.activations, scheme.outlier_threshold
        for name in INPUT_TENSORS:
            setattr(self, name, tensors.get(name))

    def sha256(self) -> str | None:
        """A digest of the weight (codes, scales, mask) and all that is done to inputs; None while it is dense."""
        held = self.held
        if isinstance(held, Tensor):
            return None
        digest = hashlib.sha256(f"{held.sha256()} {self.outlier_threshold}".encode())
        for name, tensor in self.input_tensors().items():
            digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The weight that the layer multiplies by, dense, in the dtype of the weights or of the scales."""
        return self.weight_as(self.held.dtype)

    def weight_as(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """The weight computed in `dtype`."""
        held = self.held
        return held.to(dtype) if isinstance(held, Tensor) else reference.dense_weight(held, dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self._facts["shape"]

    def transform(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """The inputs as the weight sees them: in its order, divided by their scale, in their own dtype."""
        if self.input_permutation is not None:
            x = x.index_select(-1, self.input_permutation)
        return x if self.input_scale is None else (x / self.input_scale).to(x.dtype)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        x, rounding = self.transform(x), self.rounding
        if rounding is not None:
            x = rounding(x)
        held = self.held
        if isinstance(held, Tensor):
            return nn.functional.linear(x, held, self.bias)
        return dispatch.linear(x, held, self.bias)

    def extra_repr(self) -> str:
        rows, width = self.shape
        kind = self._facts["grid"].name if "grid" in self._facts else "floats" if self._facts["alone"] else "dense"
        stored = f", {self._facts['sparsity'].text}" if self._facts["alone"] else ""
        return f"in={width}, out={rows}, {kind}{stored}" + (", masked" if self.kept is not None else "")


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
