"""CompressedLinear: the module of every compressed layer."""

from __future__ import annotations

import hashlib
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
from compress.layers.scheme import LayerScheme, Role, layer_tensors, only_codes
from compress.layers.shared_input import SharedInput
from compress.layers.transforms.permutation import InputPermutation
from compress.layers.transforms.rounding import InputRounding
from compress.layers.transforms.scale import Scale
from compress.numerics.quant.codes import Codes
from compress.numerics.sparse.positions import PackedMask, SparseLayout

Weight = Tensor | Codes | WeightPart | Sequence[WeightPart]
"""The types of weights that a layer accepts."""


def parts_of(weight: Weight) -> list[WeightPart]:
    """Convert a weight to parts.

    Args:
        weight: floats, codes, a part or parts.
    """
    if isinstance(weight, Tensor):
        return [DensePart.of(weight)]
    if isinstance(weight, Codes):
        return [CodesPart.of(weight)]
    return [weight] if isinstance(weight, WeightPart) else list(weight)


READ_DIRECTLY = "compress_read_directly"
"""The attribute of a linear whose weight a forward pass reads itself, so that it must have the model's dtype."""


class CompressedLinear(nn.Module):
    """y = sum over parts of part.product(t(x)) + bias, where t applies the transforms of the input in order.

    All weights have the shape [out, in]. The columns of `weight` are those of t(x), so a permutation among the
    transforms also determines their order. A packed mask states which weights pruning has kept, for every kind of
    storage.

    Attributes:
        transposed: whether the dense original stores [in, out].
        role: whether rows are looked up too (`layers.embedding`).
        sparsity: pattern and count of the mask; None without a mask.
        mask_words: packed mask, unless the only part stores its own.
        weight_dtype: dtype of `weight` where a forward pass reads it itself; None: that of the first part.
        shared_input: computes several layers with the same input in one call.
        traced: operands of the layer's custom operator in a traced step.
    """

    parts: nn.ModuleList
    transforms: nn.ModuleList
    mask_words: Tensor | None
    weight_dtype: torch.dtype | None = None
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
        layer = cls(weight.T if transposed else weight, bias, transposed)
        if READ_DIRECTLY in vars(module):
            layer.weight_dtype = weight.dtype
        return layer

    # The weight

    def put(self, weight: Weight, mask: Bool[Tensor, "out in"] | None = None) -> None:
        """Replace the weight [out, in].

        Args:
            weight: floats, codes, a part or parts.
            mask: the new mask. None keeps the present mask, unless the only part has its own.
        """
        parts = parts_of(weight)
        part_positions = parts[0].kept if len(parts) == 1 else None
        positions = part_positions or (self.positions if mask is None else PackedMask.of(mask))
        assert positions is None or positions.shape == parts[0].shape, "mask and weight have different shapes"
        self.traced = None
        self.mask_words = None if positions is None or part_positions is not None else positions.words
        self.sparsity = None if positions is None else positions.sparsity
        self.parts = nn.ModuleList(parts)

    def change_parts(self, change: Callable[[WeightPart], WeightPart]) -> None:
        """Replace every part by change(part)."""
        self.put([change(part) for part in self.all_parts])

    def change_transforms(self, change: Callable[[InputTransform], InputTransform]) -> None:
        """Replace every transform by change(transform), which has the same kind."""
        for transform in self.all_transforms:
            changed = change(transform)
            if changed is not transform:
                self.set_transform(changed)

    @property
    def all_parts(self) -> list[WeightPart]:
        """The parts of the weight."""
        return list(self.parts)  # type: ignore[arg-type]

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The dense weight, in the dtype of the first part, or in `weight_dtype`."""
        return self.weight_as(self.weight_dtype or self.all_parts[0].dtype)

    def weight_as(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """Dequantize the weight in `dtype`."""
        first_part, *further_parts = self.all_parts
        weight = first_part.dense(dtype)
        for part in further_parts:
            weight = weight + part.dense(dtype)
        return weight

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
        """The codes of a layer whose only part is codes; None for other layers."""
        return only_codes(self.all_parts)

    @property
    def scheme(self) -> LayerScheme:
        """The description of the layer."""
        parts = tuple(part.scheme for part in self.all_parts)
        return LayerScheme(self.shape, parts, tuple(t.scheme for t in self.all_transforms), self.role)

    def rows_at(self, ids: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n in"]:
        """Dequantize the rows `ids` in `dtype`; only these rows are dequantized if the parts allow it."""
        first_part, *further_parts = self.all_parts
        weight_rows = first_part.rows_at(ids, dtype)
        for part in further_parts:
            weight_rows = weight_rows + part.rows_at(ids, dtype)
        return weight_rows

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of parts and transforms, by their names in format `native`."""
        return layer_tensors(self.all_parts, self.all_transforms, self.scheme.prefixes)

    def read(self, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]) -> None:
        """Replace parts and transforms by stored ones."""
        self.put(parts)
        self.transforms = nn.ModuleList(transforms)

    def sha256(self) -> str:
        """Return a digest of parts and transforms with their tensors."""
        digest = hashlib.sha256()
        for component in (*self.all_parts, *self.all_transforms):
            digest.update(component.sha256().encode())
        return digest.hexdigest()

    # The mask

    @property
    def positions(self) -> PackedMask | None:
        """The packed mask, or None."""
        part_positions = self.all_parts[0].kept if len(self.parts) == 1 else None
        if part_positions is not None or self.mask_words is None:
            return part_positions
        assert self.sparsity is not None
        return PackedMask(self.mask_words, self.sparsity, self.shape)

    @property
    def mask(self) -> Bool[Tensor, "out in"] | None:
        """True for weights that pruning has kept, zero or not; None for a layer that was not pruned."""
        positions = self.positions
        return None if positions is None else positions.mask()

    def store_kept(self, sparsity: SparseLayout) -> None:
        """Convert the weight to packed sparse weights.

        Args:
            sparsity: a pattern that the mask has (`sparsities`).

        Raises:
            NumericError: if a weight outside of the mask is not zero.
        """
        mask, (part,) = self.mask, self.all_parts
        assert mask is not None
        assert part.kept is None
        if not self.is_zero_outside(mask):
            raise NumericError("weights that were pruned are no longer zero")
        self.put(SparsePart.of(part, PackedMask.of(mask, sparsity.n_of_m)))

    def is_zero_outside(self, mask: Bool[Tensor, "out in"]) -> bool:
        """Whether all weights outside of a mask are zero."""
        return not bool(self.weight.masked_fill(mask, 0).count_nonzero())

    # The input

    @property
    def all_transforms(self) -> list[InputTransform]:
        """The transforms of the input, in the order in which they are applied."""
        return list(self.transforms)  # type: ignore[arg-type]

    def transform_of(self, kind: type[Any]) -> Any:
        """Return the transform of a class, or None."""
        return next((t for t in self.transforms if isinstance(t, kind)), None)

    def set_transform(self, transform: InputTransform) -> None:
        """Add a transform in the order of ranks; it replaces a transform of the same kind."""
        transform.shape = self.shape
        other_transforms = [t for t in self.all_transforms if t.kind != transform.kind]
        self.transforms = nn.ModuleList(sorted([*other_transforms, transform], key=lambda t: t.rank))

    def drop_transform(self, transform: InputTransform) -> None:
        """Remove a transform."""
        self.transforms = nn.ModuleList(t for t in self.all_transforms if t is not transform)

    @property
    def rounding(self) -> InputRounding | None:
        """The activation quantizer, or None."""
        return self.transform_of(InputRounding)

    def round_inputs(self, rounding: InputRounding | None) -> None:
        """Replace the activation quantizer; None removes it."""
        previous = self.rounding
        if previous is not None:
            self.drop_transform(previous)
        if rounding is not None:
            self.set_transform(rounding)

    @property
    def input_permutation(self) -> Int[Tensor, " in"] | None:
        """The order of the permutation of inputs, or None."""
        permutation = self.transform_of(InputPermutation)
        return None if permutation is None else permutation.order

    def rescale_input(self, scale: Float[Tensor, " in"]) -> None:
        """Multiply the columns of the dense weight by `scale` and divide the inputs by it; the function is preserved.

        For scales that cannot be folded into an earlier layer. The scale is stored in float32. The scales of several
        calls are multiplied.
        """
        assert not self.quantized, "codes cannot be rescaled; passes that rescale come before quantizing passes"
        weight, previous = self.weight, self.transform_of(Scale)
        scale = scale.detach().to(weight.device, torch.float32)
        self.put((weight.float() * scale).to(weight.dtype))
        self.set_transform(Scale.of(scale if previous is None else previous.scale * scale, self.shape))

    def permute_input(self, order: Int[Tensor, " in"]) -> None:
        """Permute the columns of the dense weight and the inputs, channel order[j] to j; the function is preserved.

        For permutations that cannot be folded into an earlier layer. The permutations of several calls are combined.
        """
        assert not self.quantized, "codes cannot be permuted; passes that permute come before quantizing passes"
        previous_order = self.input_permutation
        self._permute_columns(order)
        self.set_transform(InputPermutation.of(order if previous_order is None else previous_order[order], self.shape))

    def _permute_columns(self, order: Int[Tensor, " in"]) -> None:
        """Permute the columns of weight and mask, and the other transforms; codes are dequantized."""
        mask = self.mask
        self.put(self.weight[:, order].contiguous(), None if mask is None else mask[:, order])
        self.transforms = nn.ModuleList(t.permuted(order) for t in self.all_transforms)

    def absorb_permutation(self) -> None:
        """Fold the permutation of inputs into weight and mask, and remove it; codes are dequantized."""
        permutation = self.transform_of(InputPermutation)
        if permutation is not None:
            self._permute_columns(permutation.order.argsort())
            self.drop_transform(permutation)

    def absorb_inputs(self, keep_zeros: bool = False) -> list[InputTransform]:
        """Fold linear transforms into the weight and remove them; the function is preserved. Codes are dequantized.

        Args:
            keep_zeros: leave transforms that move zeros of the weight, and the transforms before them.

        Returns:
            The folded transforms.
        """
        linear_transforms = [t for t in self.all_transforms if t.linear]
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
        remaining_kinds = {t.kind for t in self.all_transforms}
        return [t for t in linear_transforms if t.kind not in remaining_kinds]

    def transform(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """Apply all transforms except activation quantization."""
        for transform in self.all_transforms:
            x = x if transform.in_kernel else transform(x)
        return x

    @property
    def joint_call(self) -> tuple[dispatch.PartLike, Any, Tensor | None] | None:
        """Part, activation quantizer and bias, if the layer has one part and no other transforms; else None."""
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
        if self.weight_dtype is not None:
            self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the operands that are valid in this process only."""
        return {**self.__dict__, "traced": None}

    def extra_repr(self) -> str:
        rows, width = self.shape
        return f"in={width}, out={rows}, {self.scheme.text}" + (", masked" if self.positions is not None else "")


def _write_scheme(layer: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Add the scheme to the metadata of a state dict, because tensors of two schemes may have equal shapes."""
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
    """Append an error of `load_state_dict` if the state belongs to a layer of another scheme."""
    assert isinstance(layer, CompressedLinear)
    stored = metadata.get("scheme", layer.scheme.to_json())
    if stored != layer.scheme.to_json():
        stored_text = LayerScheme.from_json(stored).text
        errors.append(f"{prefix.removesuffix('.')} is {layer.scheme.text}, but the state dict holds {stored_text}")


def _count_kept(layer: nn.Module, keys: Any) -> None:
    """Update the number of kept weights after a mask was loaded."""
    assert isinstance(layer, CompressedLinear)
    layer.traced = None
    positions, words = layer.positions, layer.mask_words
    if words is not None and positions is not None and not words.is_meta and positions.sparsity.n_of_m is None:
        layer.sparsity = SparseLayout(int(positions.mask().count_nonzero()))


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Return the shape (out, in) of a linear of any kind."""
    if isinstance(module, CompressedLinear):
        return module.shape
    assert isinstance(module, LINEARS)
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def scheme_of(module: nn.Module) -> LayerScheme:
    """Return the storage scheme of a linear of any kind; that of a dense layer is plain."""
    return module.scheme if isinstance(module, CompressedLinear) else LayerScheme(shape_of(module))


def linears(module: nn.Module) -> dict[str, nn.Module]:
    """Return every linear of a module by name, dense or compressed, in the order of definition.

    Embedding tables and routers are excluded.
    """
    module_by_name = {n: m for n, m in module.named_modules() if isinstance(m, CompressedLinear) or is_linear(type(m))}
    return {name: child for name, child in module_by_name.items() if getattr(child, "role", "linear") != "embedding"}


def replace_linear(root: nn.Module, name: str) -> CompressedLinear:
    """Replace the linear `name` of `root` by a CompressedLinear and return it; a CompressedLinear is not replaced."""
    original = root.get_submodule(name)
    compressed = CompressedLinear.of(original)
    if compressed is not original:
        parent, _, leaf = name.rpartition(".")
        setattr(root.get_submodule(parent), leaf, compressed)
    return compressed


def renew_linear(root: nn.Module, name: str) -> CompressedLinear:
    """Replace the linear `name` of `root` by one of the same shape without weights and mask; its bias is preserved."""
    original = CompressedLinear.of(root.get_submodule(name))
    compressed = CompressedLinear(torch.empty(original.shape, device="meta"), original.bias, original.transposed)
    compressed.weight_dtype = original.weight_dtype
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, compressed)
    return compressed
