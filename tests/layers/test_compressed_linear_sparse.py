"""CompressedLinear with a mask: packed while it is worked on, the kept weights alone when it is stored."""

import copy

import pytest
import torch
from masks import random_mask, regular_mask
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.checkpoint.formats import FORMATS
from compress.checkpoint.save import layer_tensors, store_as_planned
from compress.errors import NumericError
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import CompressedLinear
from compress.layers.parts.dense import DenseScheme
from compress.layers.parts.sparse import SparsePart, SparseScheme
from compress.layers.scheme import LayerScheme
from compress.models.structure.rewrite import remember, rewrite_weight
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import SparseLayout


def masked(mask, dtype=torch.float32, seed=0):
    layer = CompressedLinear.of(nn.Linear(mask.shape[1], mask.shape[0]).to(dtype))
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    layer.put(weight * mask, mask)
    return layer


def test_a_mask_is_held_in_bits_and_given_as_it_was():
    mask = random_mask(6, 40, 0.5)
    layer = masked(mask)
    assert torch.equal(layer.mask, mask) and layer.mask.dtype == torch.bool
    assert set(layer.state_dict()) == {"bias", "parts.0.weight", "mask_words"}
    assert layer.mask_words.shape == (6, 2) and layer.scheme.plain
    assert torch.equal(copy.deepcopy(layer).mask, mask)
    assert CompressedLinear.of(nn.Linear(3, 2)).mask is None


@pytest.mark.parametrize("pattern", ["2:4", "bitmask"])
@pytest.mark.parametrize("grid", [None, "int4", "nf4"])
def test_kept_weights_alone_are_the_same_function(grid, pattern):
    mask = regular_mask(6, 42, 2, 4)
    layer = masked(mask)
    if grid is not None:
        layer.put(quantize(layer.weight, GRIDS[grid], 16, mask=mask))
    x, weight = torch.randn(5, 42), layer.weight
    with plain_torch():
        wanted = layer(x)
        layer.store_kept(SparseLayout.named(pattern, int(mask.sum())))
        assert torch.equal(layer(x), wanted) and torch.equal(layer.weight, weight)
    assert torch.equal(layer.mask, mask) and layer.mask_words is None
    tensors = {"weight_kept", "weight_values"} if grid is None else {"weight_kept", "weight_packed", "weight_scale"}
    assert set(layer.tensors()) == tensors
    (part,) = layer.all_parts
    assert isinstance(part, SparsePart) and layer.quantized == (grid is not None) and layer.codes is None
    assert part.scheme.sparsity == SparseLayout.named(pattern, int(mask.sum()))
    assert repr(layer).count(pattern) == 1 and "masked" in repr(layer)
    assert torch.equal(
        layer.weight_as(torch.bfloat16), weight.bfloat16() if grid is None else layer.weight_as(torch.bfloat16)
    )


def test_a_kept_zero_stays_out_of_the_mask():
    mask = random_mask(8, 64, 0.5)
    layer = masked(mask)
    codes = quantize(layer.weight, GRIDS["int2"], 64, mask=mask)
    zeros = (codes.dense() == 0) & mask
    assert int(zeros.sum()) > 20  # int2 rounds many kept weights to zero
    layer.put(codes)
    assert torch.equal(layer.mask, mask)
    layer.store_kept(SparseLayout(int(mask.sum())))
    assert torch.equal(layer.mask, mask) and bool((layer.weight[zeros] == 0).all())


def test_work_goes_on_from_a_sparse_layer():
    mask = regular_mask(4, 16, 2, 4)
    layer = masked(mask)
    weight = layer.weight
    layer.store_kept(SparseLayout(32, (2, 4)))
    layer.rescale_input(torch.full((16,), 2.0))
    assert (
        torch.equal(layer.weight, weight * 2)
        and torch.equal(layer.mask, mask)
        and layer.scheme.parts == (DenseScheme(),)
    )
    layer.store_kept(SparseLayout(32, (2, 4)))
    layer.absorb_inputs()
    assert torch.equal(layer.weight, weight) and torch.equal(layer.mask, mask)
    layer.store_kept(SparseLayout(32, (2, 4)))
    layer.put(quantize(layer.weight, GRIDS["int4"], 8, mask=layer.mask))
    assert torch.equal(layer.mask, mask) and layer.codes is not None and layer.codes.kept is None


def test_columns_and_mask_change_places_together_and_back():
    mask = regular_mask(4, 16, 2, 4)
    layer = masked(mask)
    layer.store_kept(SparseLayout(32, (2, 4)))
    weight, order = layer.weight, torch.randperm(16)
    undo = remember(layer)
    rewrite_weight(layer, lambda w: w[:, order])
    assert torch.equal(layer.mask, mask[:, order]) and torch.equal(layer.weight, weight[:, order])
    undo()
    assert torch.equal(layer.mask, mask) and torch.equal(layer.weight, weight)
    assert [type(part) for part in layer.all_parts] == [SparsePart]


def test_the_mask_of_another_weight_is_our_mistake():
    layer = masked(random_mask(4, 16, 0.5))
    with pytest.raises(AssertionError, match="mask and weight have different shapes"):
        layer.put(torch.ones(4, 8))


def test_a_weight_that_came_back_is_an_error_and_not_dropped():
    layer = masked(regular_mask(4, 16, 2, 4))
    layer.put(layer.weight + 1)
    with pytest.raises(NumericError, match="weights that were pruned are no longer zero"):
        layer.store_kept(SparseLayout(32, (2, 4)))
    block = nn.ModuleDict({"mlp": nn.ModuleDict({"up": masked(regular_mask(4, 16, 2, 4))})})
    block["mlp"]["up"].put(torch.ones(4, 16))
    with pytest.raises(NumericError, match=r"model\.layers\.0\.mlp\.up: weights that were pruned are no longer zero"):
        store_as_planned("model.layers.0", block, torch.float32, "auto")


@pytest.mark.parametrize(
    ("policy", "density", "grid", "ends"),
    [
        ("auto", 0.5, None, "kept"),
        ("auto", 0.99, None, "all"),
        ("always", 0.99, None, "kept"),
        ("off", 0.5, None, "all"),
        ("auto", 0.5, "int4", "kept"),
        ("auto", 0.95, "int4", "all"),
        ("always", 0.95, "int4", "kept"),
        ("off", 0.5, "int4", "all"),
    ],
)
def test_what_a_layer_is_stored_as(policy, density, grid, ends):
    mask = random_mask(16, 256, density)
    block = nn.ModuleDict({"a": masked(mask), "b": nn.Linear(4, 4)})
    if grid is not None:
        block["a"].put(quantize(block["a"].weight, GRIDS[grid], 64, mask=mask))
    store_as_planned("x", block, torch.float32, policy)
    (part,) = block["a"].all_parts
    assert isinstance(part, SparsePart) == (part.kept is not None) == (ends == "kept")
    assert part.scheme.quantized == (grid is not None)
    assert torch.equal(block["a"].mask, mask)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_values_are_stored_in_the_storage_dtype_as_out_times_in(storage, transposed):
    mask = regular_mask(6, 8, 2, 4)
    dense = Conv1D(6, 8) if transposed else nn.Linear(8, 6)
    layer = CompressedLinear.of(dense)
    layer.put((layer.weight.to(storage).float()) * mask, mask)
    layer.store_kept(SparseLayout(24, (2, 4)))
    tensors = layer_tensors(layer, FORMATS["native"], storage)
    assert set(tensors) == {"weight_values", "weight_kept", "bias"}
    assert tensors["weight_values"].dtype == storage and tensors["weight_values"].shape == (6, 4)
    read = CompressedLinear.of(Conv1D(6, 8) if transposed else nn.Linear(8, 6))
    read.read(*FORMATS["native"].decode(tensors, layer.scheme))
    assert torch.equal(read.weight.float(), layer.weight.float()) and read.scheme == layer.scheme
    layer.change_parts(lambda part: part.in_storage(storage))
    assert read.sha256() == layer.sha256()


def test_the_scheme_of_a_sparse_layer():
    mask = regular_mask(6, 8, 2, 4)
    layer = masked(mask)
    layer.store_kept(SparseLayout(24, (2, 4)))
    assert layer.scheme == LayerScheme((6, 8), (SparseScheme(SparseLayout(24, (2, 4)), DenseScheme()),))
    assert layer.scheme.text == "2:4"
