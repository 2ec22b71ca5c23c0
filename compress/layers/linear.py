"""CompressedLinear: the module of every compressed layer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from typing_extensions import Self

from compress.errors import NumericError
from compress.kernels import dispatch
from compress.kernels.recording import as_operators
from compress.layers.base import InputTransform, WeightPart
from compress.layers.dense_linear import LINEARS as LINEARS
from compress.layers.dense_linear import is_linear
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.parts.sparse import SparsePart
from compress.layers.scheme import LayerScheme, Role, codes_alone, layer_tensors
from compress.layers.shared_input import SharedInput
from compress.layers.transforms.permutation import Permutation
from compress.layers.transforms.rounding import InputRounding
from compress.layers.transforms.scale import Scale
from compress.numerics.quant.codes import Codes
from compress.numerics.sparse.positions import PackedMask, SparseLayout

Weight = Tensor | Codes | WeightPart | Sequence[WeightPart]
"""The types of weights that a layer accepts."""


def parts_of(weight: Weight) -> list[WeightPart]:
    """Convert a weight to parts; it may be floats, codes, a part or parts."""
    if isinstance(weight, Tensor):
        return [DensePart.of(weight)]
    if isinstance(weight, Codes):
        return [CodesPart.of(weight)]
    return [weight] if isinstance(weight, WeightPart) else list(weight)


class CompressedLinear(nn.Module):
    """y = sum over parts of part.product(t(x)) + bias, with t the transforms of the input in order.

    All weights have the shape [out, in]; `transposed`: the dense original stores [in, out]. The columns of `weight` are
    those of t(x), so a permutation among the transforms also determines their order. A packed mask states which weights
    pruning has kept, for every kind of storage. role: whether rows are looked up too (`model.embedding`).
    """

    parts: nn.ModuleList
    transforms: nn.ModuleList
    mask_words: Tensor | None
    shared_input: SharedInput | None = None
    traced: tuple[int, int, int, int, float] | None = None

    def __init__(self, weight: Weight, bias: Tensor | None, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.role: Role = "linear"
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("mask_words", None)
        self.sparsity: SparseLayout | None = None  # of the mask
        self.parts, self.transforms = nn.ModuleList(), nn.ModuleList()
        self.put(weight)
        self.register_state_dict_post_hook(_write_scheme)
        self.register_load_state_dict_pre_hook(_check_scheme)
        self.register_load_state_dict_post_hook(_count_kept)

    @classmethod
    def of(cls, module: nn.Module) -> CompressedLinear:
        """Convert a dense layer to a CompressedLinear of the same function; the weight is shared, not copied."""
        if isinstance(module, CompressedLinear):
            return module
        assert isinstance(module, LINEARS)
        transposed = isinstance(module, Conv1D)
        weight = module.weight.detach()
        bias = None if module.bias is None else module.bias.detach()
        return cls(weight.T if transposed else weight, bias, transposed)

    # The weight

    def put(self, weight: Weight, mask: Bool[Tensor, "out in"] | None = None) -> None:
        """Replace the weight [out, in]. The present mask stays unless another is given or the only part has its own."""
        parts = parts_of(weight)
        own = parts[0].kept if len(parts) == 1 else None
        kept = own or (self.positions if mask is None else PackedMask.of(mask))
        assert kept is None or kept.shape == parts[0].shape, "mask and weight have different shapes"
        self.traced = None
        self.mask_words = None if kept is None or own is not None else kept.words
        self.sparsity = None if kept is None else kept.sparsity
        self.parts = nn.ModuleList(parts)

    def change_parts(self, change: Callable[[WeightPart], WeightPart]) -> None:
        """Replace every part by change(part)."""
        self.put([change(part) for part in self.all_parts])

    @property
    def all_parts(self) -> list[WeightPart]:
        """The parts of the weight."""
        return list(self.parts)  # type: ignore[arg-type]

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The dense weight, in the dtype of the first part."""
        return self.weight_as(self.all_parts[0].dtype)

    def weight_as(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """The dense weight, computed in `dtype`."""
        first, *others = self.all_parts
        found = first.dense(dtype)
        for part in others:
            found = found + part.dense(dtype)
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.all_parts[0].shape

    @property
    def quantized(self) -> bool:
        """Whether any part holds codes."""
        return any(part.scheme.quantized for part in self.all_parts)

    @property
    def codes(self) -> CodesPart | None:
        """The codes of a layer whose weight is codes alone; None for others."""
        return codes_alone(self.all_parts)

    @property
    def scheme(self) -> LayerScheme:
        """The description of the layer."""
        parts = tuple(part.scheme for part in self.all_parts)
        return LayerScheme(self.shape, parts, tuple(t.scheme for t in self.all_transforms), self.role)

    def rows_at(self, ids: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n in"]:
        """Some rows of the dense weight, computed in `dtype`; only these rows are dequantized where parts allow it."""
        first, *others = self.all_parts
        found = first.rows_at(ids, dtype)
        for part in others:
            found = found + part.rows_at(ids, dtype)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of parts and transforms, by their names in format `native`."""
        return layer_tensors(self.all_parts, self.all_transforms, self.scheme.prefixes)

    def read(self, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]) -> None:
        """Replace parts and transforms by stored ones."""
        self.put(parts)
        self.transforms = nn.ModuleList(transforms)

    def sha256(self) -> str:
        """A digest of parts and transforms with their tensors."""
        digest = hashlib.sha256()
        for component in (*self.all_parts, *self.all_transforms):
            digest.update(component.sha256().encode())
        return digest.hexdigest()

    # The mask

    @property
    def positions(self) -> PackedMask | None:
        """The packed mask, or None."""
        own = self.all_parts[0].kept if len(self.parts) == 1 else None
        if own is not None or self.mask_words is None:
            return own
        assert self.sparsity is not None
        return PackedMask(self.mask_words, self.sparsity, self.shape)

    @property
    def mask(self) -> Bool[Tensor, "out in"] | None:
        """True for weights that pruning has kept, zero or not; None for a layer that was not pruned."""
        positions = self.positions
        return None if positions is None else positions.mask()

    def store_kept(self, sparsity: SparseLayout) -> None:
        """Convert the weight to one that stores kept weights alone. sparsity: one that the mask has (`sparsities`).

        Raises NumericError if a weight outside of the mask is not zero.
        """
        mask, (part,), before = self.mask, self.all_parts, int(self.weight.count_nonzero())
        assert mask is not None
        assert part.kept is None
        self.put(SparsePart.of(part, PackedMask.of(mask, sparsity.n_of_m)))
        if int(self.weight.count_nonzero()) != before:
            raise NumericError("weights that were pruned are no longer zero")

    # The input

    @property
    def all_transforms(self) -> list[InputTransform]:
        """The transforms of the input, in the order in which they are applied."""
        return list(self.transforms)  # type: ignore[arg-type]

    def transform_of(self, kind: type[Any]) -> Any:
        """The transform of a class, or None."""
        return next((t for t in self.transforms if isinstance(t, kind)), None)

    def set_transform(self, transform: InputTransform) -> None:
        """Add a transform in the order of ranks; it replaces a transform of the same kind."""
        transform.shape = self.shape
        others = [t for t in self.all_transforms if t.kind != transform.kind]
        self.transforms = nn.ModuleList(sorted([*others, transform], key=lambda t: t.rank))

    def drop_transform(self, transform: InputTransform) -> None:
        """Remove a transform."""
        self.transforms = nn.ModuleList(t for t in self.all_transforms if t is not transform)

    @property
    def rounding(self) -> InputRounding | None:
        """The rounding of inputs, or None."""
        return self.transform_of(InputRounding)

    def round_inputs(self, rounding: InputRounding | None) -> None:
        """Replace the rounding of inputs; None removes it."""
        before = self.rounding
        if before is not None:
            self.drop_transform(before)
        if rounding is not None:
            self.set_transform(rounding)

    @property
    def input_permutation(self) -> Int[Tensor, " in"] | None:
        """The order of the permutation of inputs, or None."""
        permutation = self.transform_of(Permutation)
        return None if permutation is None else permutation.order

    def rescale_input(self, scale: Float[Tensor, " in"]) -> None:
        """Multiply the columns of the dense weight by `scale` and divide the inputs by it; the function is preserved.

        For scales that cannot be folded into the layers before. The scale is stored in float32; several calls multiply.
        """
        assert not self.quantized, "codes cannot be rescaled; passes that rescale come before quantizing passes"
        weight, before = self.weight, self.transform_of(Scale)
        scale = scale.detach().to(weight.device, torch.float32)
        self.put((weight.float() * scale).to(weight.dtype))
        self.set_transform(Scale.of(scale if before is None else before.scale * scale, self.shape))

    def permute_input(self, order: Int[Tensor, " in"]) -> None:
        """Permute the columns of the dense weight and the inputs, channel order[j] to j; the function is preserved.

        For permutations that cannot be folded into the layers before. Several calls are combined.
        """
        assert not self.quantized, "codes cannot be permuted; passes that permute come before quantizing passes"
        before = self.input_permutation
        self._permute_columns(order)
        self.set_transform(Permutation.of(order if before is None else before[order], self.shape))

    def _permute_columns(self, order: Int[Tensor, " in"]) -> None:
        """Permute the columns of weight and mask, and the other transforms; codes are dequantized."""
        mask = self.mask
        self.put(self.weight[:, order].contiguous(), None if mask is None else mask[:, order])
        self.transforms = nn.ModuleList(t.permuted(order) for t in self.all_transforms)

    def absorb_permutation(self) -> None:
        """Fold the permutation of inputs into weight and mask, and remove it; codes are dequantized."""
        permutation = self.transform_of(Permutation)
        if permutation is not None:
            self._permute_columns(permutation.order.argsort())
            self.drop_transform(permutation)

    def absorb_inputs(self, keep_zeros: bool = False) -> list[InputTransform]:
        """Fold linear transforms into the weight and remove them; the function is preserved. Returns these transforms.

        keep_zeros: leave transforms that move zeros of the weight, and those before them. Codes are dequantized.
        """
        before = [t for t in self.all_transforms if t.linear]
        if not keep_zeros:
            self.absorb_permutation()
        for transform in reversed([t for t in self.all_transforms if t.linear]):
            if keep_zeros and not transform.keeps_zeros:
                break
            mask = self.mask
            if mask is not None and not transform.keeps_zeros:
                mask = transform.absorbed(mask.float()) != 0
            self.put(transform.absorbed(self.weight), mask)
            self.drop_transform(transform)
        left = {t.kind for t in self.all_transforms}
        return [t for t in before if t.kind not in left]

    def transform(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """Apply all transforms except rounding."""
        for transform in self.all_transforms:
            x = x if transform.in_kernel else transform(x)
        return x

    @property
    def joint_call(self) -> tuple[dispatch.Part, Any, Tensor | None] | None:
        """Part, rounding of inputs and bias of a layer that is nothing else; None for other layers."""
        parts, transforms = self._modules["parts"]._modules, self._modules["transforms"]._modules  # type: ignore[union-attr]
        rounding: Any = next(iter(transforms.values()), None)
        if len(parts) > 1 or len(transforms) > 1 or not (rounding is None or rounding.in_kernel):
            return None
        part: Any = parts["0"]
        return part, rounding, self.bias

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        if as_operators():
            if self.traced is not None:
                return dispatch.traced_linear(x, self.bias, *self.traced)
        elif self.shared_input is not None and (y := self.shared_input.output(self, x)) is not None:
            return y
        rounding: Any = None
        transform: Any
        for transform in self.transforms:
            if transform.in_kernel:
                rounding = transform
            else:
                x = transform(x)
        parts: Any = self.parts
        return dispatch.linear(x, parts, rounding, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # moved or cast
        self.traced = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude what stands for weights in this process only."""
        return {**self.__dict__, "traced": None}

    def extra_repr(self) -> str:
        rows, width = self.shape
        return f"in={width}, out={rows}, {self.scheme.text}" + (", masked" if self.positions is not None else "")


def _write_scheme(layer: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Add the scheme to the metadata of a state dict: the tensors of two schemes may have equal shapes."""
    assert isinstance(layer, CompressedLinear)
    metadata["scheme"] = layer.scheme.to_json()


def _check_scheme(
    layer: nn.Module,
    state: Any,
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Report an error of `load_state_dict` if the state is that of a layer of another scheme."""
    assert isinstance(layer, CompressedLinear)
    stored = metadata.get("scheme", layer.scheme.to_json())
    if stored != layer.scheme.to_json():
        there = LayerScheme.from_json(stored).text
        errors.append(f"{prefix.removesuffix('.')} is {layer.scheme.text}, but the state dict holds {there}")


def _count_kept(layer: nn.Module, keys: Any) -> None:
    """Update the number of kept weights to that of the mask that was loaded."""
    assert isinstance(layer, CompressedLinear)
    layer.traced = None
    positions, words = layer.positions, layer.mask_words
    if words is not None and positions is not None and not words.is_meta and positions.sparsity.n_of_m is None:
        layer.sparsity = SparseLayout(int(positions.mask().sum()))


def shape_of(module: nn.Module) -> tuple[int, int]:
    """The shape (out, in) of a linear of any kind."""
    if isinstance(module, CompressedLinear):
        return module.shape
    assert isinstance(module, LINEARS)
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def scheme_of(module: nn.Module) -> LayerScheme:
    """The storage scheme of a linear of any kind; that of a dense layer is plain."""
    return module.scheme if isinstance(module, CompressedLinear) else LayerScheme(shape_of(module))


def linears(module: nn.Module) -> dict[str, nn.Module]:
    """Every linear of a module by name, dense or compressed, in the order of definition; no tables or routers."""
    found = {n: m for n, m in module.named_modules() if isinstance(m, CompressedLinear) or is_linear(type(m))}
    return {name: child for name, child in found.items() if getattr(child, "role", "linear") != "embedding"}


def kind_of(name: str) -> str:
    """The kind of a module of several blocks: its name with '*' for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def replace_linear(root: nn.Module, name: str) -> CompressedLinear:
    """Replace the linear `name` of `root` by a CompressedLinear, and return it; a CompressedLinear stays."""
    old = root.get_submodule(name)
    new = CompressedLinear.of(old)
    if new is not old:
        parent, _, leaf = name.rpartition(".")
        setattr(root.get_submodule(parent), leaf, new)
    return new


def renew_linear(root: nn.Module, name: str) -> CompressedLinear:
    """Replace the linear `name` of `root` by one of the same shape without weights or mask; its bias stays."""
    old = CompressedLinear.of(root.get_submodule(name))
    new = CompressedLinear(torch.empty(old.shape, device="meta"), old.bias, old.transposed)
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, new)
    return new
