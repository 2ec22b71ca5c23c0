"""Any layer that a file may describe is refused, or computes the same with kernels as without them."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import RandomLayer, random_tensors
from schemes import coded, rounding

from compress.kernels import dispatch
from compress.layers.linear import CompressedLinear
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.bits import pack
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS


def make(grid, shape, group_size, symmetric=True):
    """The codes of a random weight."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return CodesPart.of(quantize(weight, GRIDS[grid], group_size, symmetric=symmetric))


def read(scheme, tensors):
    """The layer of a scheme and its tensors, as it is loaded."""
    parts, transforms = scheme.read(tensors)
    layer = CompressedLinear(parts, None)
    layer.read(parts, transforms)
    return layer


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_a_random_layer_is_refused_or_computed(seed):
    chance = random.Random(seed)
    try:
        scheme = LayerScheme.from_json(RandomLayer(chance).scheme())
        tensors = random_tensors(scheme, chance)
        layer = read(scheme, tensors)
    except ValueError as error:
        assert str(error)
        return
    x = torch.randn(3, scheme.shape[1], generator=torch.Generator().manual_seed(seed))
    computed = layer(x)
    with dispatch.plain_torch():
        expected = layer(x)
    assert expected.isfinite().all()
    assert (computed - expected).norm() <= 0.02 * expected.norm() + 1e-6
    assert layer.rows_at(torch.tensor([0]), torch.float32).shape == (1, scheme.shape[1])


def parts_of(*parts, shape=(8, 12), transforms=()):
    """The description of a layer as JSON."""
    return {"shape": list(shape), "parts": list(parts), "transforms": list(transforms)}


CODES = {"kind": "codes", "grid": "int4", "group_size": 4}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (parts_of({**CODES, "group_size": 10**7}), "group_size 10000000 is larger"),
        (parts_of({**CODES, "grid": "mxfp4", "group_size": 10**7}), "groups of mxfp4 have 32 columns"),
        (parts_of({"kind": "lattice", "bits": 2, "rotated": 2**40}, shape=(8, 16)), "does not fit its 8 outputs"),
        (parts_of({"kind": "lattice", "bits": 2}), "do not divide its 12 inputs"),
        (parts_of(*[{"kind": "dense"}] * 100_000), "at most 64"),
        (parts_of(shape=(2**40, 2**40)), "at most|from 1 to|at least one part"),
        (parts_of(CODES, shape=(2**40, 2**40)), "from 1 to"),
        (parts_of(CODES, transforms=[{"kind": "hadamard", "block": 2**40}]), "does not fit 12 inputs"),
        (parts_of(CODES, transforms=[{"kind": "scale"}, {"kind": "scale"}]), "one transform of each kind"),
        (parts_of(CODES, transforms=[{"kind": "rounding", "grid": "nf4_dq"}]), "cannot be rounded to nf4_dq"),
        (
            parts_of(CODES, transforms=[{"kind": "rounding", "grid": "int8", "scale": "group", "group": 5}]),
            "do not divide its 12 inputs",
        ),
    ],
)
def test_a_layer_that_cannot_be_computed_is_refused_before_it_is_read(values, reason):
    with pytest.raises(ValueError, match=reason):
        LayerScheme.from_json(values)


def test_a_matrix_of_one_large_factor_does_not_fit():
    """1000004 is the order of a Paley matrix, which has 10^12 numbers."""
    values = parts_of(CODES, shape=(1, 1_000_004), transforms=[{"kind": "hadamard", "block": 1_000_004}])
    with pytest.raises(ValueError, match="does not fit 1000004 inputs"):
        LayerScheme.from_json(values)


@pytest.mark.parametrize("grid", ["ternary", "fp4_bnb", "fp8_e4m3", "fp8_e5m2"])
def test_a_code_that_the_grid_does_not_have_is_refused(grid):
    part = make(grid, (3, 40), 8)
    scheme, tensors = LayerScheme(part.shape, (part.scheme,)), part.tensors()
    stored = {f"weight_{name}": tensor for name, tensor in tensors.items()}
    read(scheme, stored)
    codes = torch.zeros(3, 40, dtype=torch.uint8)
    codes[2, 39] = 2**part.grid.bits - 1
    with pytest.raises(ValueError, match=f"weight_packed holds codes that {grid} does not have"):
        read(scheme, stored | {"weight_packed": pack(codes, part.grid.bits)})


def test_scales_that_are_not_finite_are_refused():
    part = make("int4", (3, 40), 8)
    scheme = LayerScheme(part.shape, (part.scheme,), (rounding(scale="static"),))
    stored = {f"weight_{name}": tensor for name, tensor in part.tensors().items()} | {"input_scale": torch.ones(1)}
    read(scheme, stored)
    for name, value in (("weight_scale", torch.nan), ("input_scale", torch.inf), ("input_scale", 0)):
        with pytest.raises(ValueError, match=name):
            read(scheme, stored | {name: torch.full_like(stored[name], value)})
    part = make("mxfp4", (3, 64), 32)
    stored = {f"weight_{name}": tensor for name, tensor in part.tensors().items()}
    stored["weight_scale"][0] = 255  # NaN in E8M0
    with pytest.raises(ValueError, match="weight_scale holds a number that is not finite"):
        read(LayerScheme(part.shape, (part.scheme,)), stored)


def test_a_group_of_more_columns_than_its_size_is_refused():
    """Kernels gather the columns of each group, and pad all groups to the size of the largest one."""
    part, scheme = make("int4", (3, 64), 1), coded("int4", 1, indexed=True, shape=(3, 64))
    stored = {f"weight_{name}": tensor for name, tensor in part.tensors().items()}
    read(scheme, stored | {"weight_g_idx": torch.arange(64, dtype=torch.int32).flip(0)})
    with pytest.raises(ValueError, match="weight_g_idx holds a group of 64 columns, but group_size is 1"):
        read(scheme, stored | {"weight_g_idx": torch.zeros(64, dtype=torch.int32)})


def test_a_zero_point_that_is_no_code_is_refused():
    part = make("int4", (3, 40), 8, symmetric=False)
    stored = {f"weight_{name}": tensor for name, tensor in part.tensors().items()}
    stored["weight_zero_point"][0] = 9
    with pytest.raises(ValueError, match="weight_zero_point holds"):
        read(LayerScheme(part.shape, (part.scheme,)), stored)
