"""Sparse layers in format native: the tensors of the specification, exact both ways, and damage that is named."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from masks import WITH_ZERO, random_mask, regular_mask
from schemes import coded, decoded, encoded, layer_of

from compress.checkpoint.formats import FORMATS
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.parts.sparse import SparsePart
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import PackedMask, SparseLayout, sparsities

FORMAT = FORMATS["native"]


def in_json(scheme):
    config = json.loads(json.dumps(FORMAT.config({"a": scheme}, [], "0.1")))
    return FORMAT.schemes(config, {"a": scheme.shape}, {})["a"]


def sparse_codes(mask, n_of_m=None, grid="int4", group_size=16, symmetric=True):
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    whole = CodesPart.of(quantize(weight, GRIDS[grid], group_size, symmetric, mask=mask))
    return SparsePart.of(whole, PackedMask.of(mask, n_of_m))


def sparse_floats(mask, n_of_m=None, dtype=torch.float32):
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return SparsePart.of(DensePart.of(weight * mask), PackedMask.of(mask, n_of_m))


@settings(max_examples=80)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 90)),
    n_of_m=st.none() | st.tuples(st.integers(1, 8), st.integers(2, 9)),
    grid=st.none() | st.sampled_from(WITH_ZERO),
    group_size=st.sampled_from(["channel", "tensor", 1, 7, 32]),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    density=st.floats(0, 1),
)
def test_whatever_is_stored_reads_back_as_it_was_and_has_the_planned_size(
    shape, n_of_m, grid, group_size, symmetric, dtype, density
):
    assume(n_of_m is None or n_of_m[0] < n_of_m[1] <= shape[1])
    if grid is not None and GRIDS[grid].block > 1:  # super-blocks take whole columns, in groups of their size
        shape, group_size, symmetric = (shape[0], GRIDS[grid].block), GRIDS[grid].group_size, True
    group_size = min(group_size, shape[1]) if isinstance(group_size, int) else group_size
    mask = random_mask(*shape, density) if n_of_m is None else regular_mask(*shape, *n_of_m)
    if grid is None:
        weight = sparse_floats(mask, n_of_m, dtype)
    else:
        group_size = GRIDS[grid].group_size or group_size
        weight = sparse_codes(mask, n_of_m, grid, group_size, symmetric or GRIDS[grid].symmetric_only)
        weight = weight.in_storage(dtype)
    scheme, tensors = in_json(layer_of(weight)), encoded(FORMAT, weight)
    assert scheme == layer_of(weight)
    found = decoded(FORMAT, tensors, scheme)
    assert found.sha256() == weight.sha256() and found.dtype == weight.dtype
    assert torch.equal(found.dense(dtype), weight.dense(dtype))
    assert torch.equal(found.kept.mask(), mask)
    assert FORMAT.size_bytes(scheme, dtype) == sum(t.numel() * t.element_size() for t in tensors.values())


def test_the_names_and_dtypes_of_the_specification():
    def facts(tensors):
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

    mask = regular_mask(5, 38, 3, 5)  # 7 groups, 3 columns more
    bits = 7 * 3 * 3, 24 * 4  # indexes of 3 bits, 24 codes of 4 per row
    assert facts(encoded(FORMAT, sparse_floats(mask, (3, 5), torch.bfloat16))) == {
        "weight_kept": (torch.int32, (5, -(-bits[0] // 32))),
        "weight_values": (torch.bfloat16, (5, 24)),
    }
    assert facts(encoded(FORMAT, sparse_codes(mask, (3, 5), symmetric=False))) == {
        "weight_kept": (torch.int32, (5, 2)),
        "weight_packed": (torch.int32, (5, bits[1] // 32)),
        "weight_scale": (torch.float32, (5, 3)),
        "weight_zero_point": (torch.int8, (5, 3)),
    }
    assert facts(encoded(FORMAT, sparse_floats(mask))) == {
        "weight_kept": (torch.int32, (5, 2)),
        "weight_values": (torch.float32, (120,)),
    }
    assert facts(encoded(FORMAT, sparse_codes(mask))) == {
        "weight_kept": (torch.int32, (5, 2)),
        "weight_packed": (torch.int32, (15,)),
        "weight_scale": (torch.float32, (5, 3)),
    }


def test_the_config_says_what_is_kept_and_other_layers_say_nothing_of_it():
    mask = regular_mask(4, 16, 2, 4)
    assert layer_of(sparse_floats(mask, (2, 4))).to_json() == {
        "shape": [4, 16],
        "parts": [{"kind": "sparse", "pattern": "2:4", "kept": 32, "values": {"kind": "dense"}}],
    }
    values = {"kind": "codes", "grid": "int4", "group_size": 16}
    part = {"kind": "sparse", "pattern": "bitmask", "kept": 32, "values": values}
    assert layer_of(sparse_codes(mask)).to_json()["parts"] == [part]
    assert "kept" not in str(coded().to_json())


def test_other_formats_do_not_store_kept_weights_alone():
    for name in ("dense", "compressed-tensors"):
        assert not FORMATS[name].sparse
    scheme = layer_of(sparse_floats(regular_mask(4, 16, 2, 4)))
    assert FORMATS["compressed-tensors"].refuses(scheme).endswith("holds only codes, not bitmask; use format: native")


MASK = regular_mask(6, 64, 2, 4)  # every mask of 6 x 64 that keeps 2 of 4 keeps 192


def cut(name, *index):
    return lambda tensors: tensors.update({name: tensors[name][index].clone()})


def changed(name, value):
    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] = value

    return change


@pytest.mark.parametrize(
    ("weight", "damage", "message"),
    [
        (
            sparse_floats(MASK),
            cut("weight_values", slice(100)),
            r"weight_values is torch.float32 \[100\], but it must be torch.float32 \[192\]",
        ),
        (sparse_floats(MASK), changed("weight_kept", 0), r"weight_kept marks 17\d weights as kept, but there are 192"),
        (
            sparse_floats(MASK),
            cut("weight_kept", slice(5)),
            r"weight_kept is torch.int32 \[5, 2\], but it must be torch.int32 \[6, 2\]",
        ),
        (
            sparse_floats(MASK),
            cut("weight_kept", slice(None), slice(1)),
            r"weight_kept is torch.int32 \[6, 1\], but it must be torch.int32 \[6, 2\]",
        ),
        (
            sparse_floats(MASK),
            lambda t: t.update(weight_kept=t["weight_kept"].flatten()),
            r"weight_kept is torch.int32 \[12\], but it must",
        ),
        (
            sparse_floats(MASK),
            lambda t: t.update(weight_kept=torch.tensor(3)),
            r"weight_kept is torch.int64 \[\], but it must",
        ),
        (sparse_floats(MASK), lambda t: t.update(weight_kept=t["weight_kept"].long()), "weight_kept is torch.int64"),
        (
            sparse_floats(MASK),
            lambda t: t.update(weight_values=torch.ones(192).int()),
            "weight_values holds torch.int32, not floats",
        ),
        (
            sparse_floats(MASK, (2, 4)),
            cut("weight_values", slice(None), slice(31)),
            r"weight_values is torch.float32 \[6, 31\], but it must be torch.float32 \[6, 32\]",
        ),
        (
            sparse_floats(MASK, (2, 4)),
            changed("weight_kept", 0),
            "weight_kept holds indexes that are not 2 different ones below 4",
        ),
        (
            sparse_floats(MASK, (2, 4)),
            cut("weight_kept", slice(4)),
            r"weight_kept is torch.int32 \[4, 2\], but it must be torch.int32 \[6, 2\]",
        ),
        (
            sparse_codes(MASK),
            cut("weight_packed", slice(23)),
            r"weight_packed is torch.int32 \[23\], but it must be torch.int32 \[24\]",
        ),
        (
            sparse_codes(MASK, (2, 4)),
            cut("weight_packed", slice(None), slice(3)),
            r"weight_packed is torch.int32 \[6, 3\], but it must be torch.int32 \[6, 4\]",
        ),
        (
            sparse_codes(MASK, (2, 4)),
            cut("weight_scale", slice(3)),
            r"weight_scale is torch.float32 \[3, 4\], but it must be torch.float32 \[6, 4\]",
        ),
        (
            sparse_codes(MASK, (2, 4), symmetric=False),
            cut("weight_zero_point", slice(3)),
            "weight_zero_point is torch.int8",
        ),
        (sparse_codes(MASK, (2, 4)), changed("weight_kept", -1), "weight_kept holds indexes that are not 2"),
    ],
)
def test_tensors_that_contradict_each_other(weight, damage, message):
    tensors = encoded(FORMAT, weight)
    decoded(FORMAT, tensors, layer_of(weight))
    damage(tensors)
    with pytest.raises(ValueError, match=message):
        decoded(FORMAT, tensors, layer_of(weight))


@pytest.mark.parametrize("weight", [sparse_floats(MASK, (2, 4)), sparse_codes(MASK, (2, 4))])
def test_a_count_in_the_config_that_cannot_be(weight):
    scheme = replace(weight.scheme, sparsity=SparseLayout(160, (2, 4)))
    with pytest.raises(ValueError, match="2:4 keeps 192 of its 6 x 64 weights, not 160"):
        layer_of(weight).with_parts(scheme).check()


@pytest.mark.parametrize("name", ["weight_values", "weight_kept"])
def test_tensors_that_are_missing(name):
    weight = sparse_floats(MASK)
    tensors = encoded(FORMAT, weight)
    del tensors[name]
    with pytest.raises(KeyError, match=name):
        decoded(FORMAT, tensors, layer_of(weight))


def test_the_mask_of_the_tests_has_both_forms():
    assert [s.text for s in sparsities(MASK)][-1] == "bitmask" and "2:4" in [s.text for s in sparsities(MASK)]
