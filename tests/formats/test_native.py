"""The native format: every grid and every group, exact both ways, and schemes as plain JSON."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.formats import FORMATS
from compress.numerics.quant.grids import GRIDS, IntGrid
from compress.weights.base import Scheme

FORMAT = FORMATS["native"]


@settings(deadline=None, max_examples=60)
@given(
    grid=st.sampled_from(list(GRIDS)),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    group_size=st.sampled_from(["channel", "tensor", 1, 7, 32, 100]),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    indexed=st.booleans(),
    activations=st.sampled_from([None, GRIDS["int8"], GRIDS["fp8_e4m3"]]),
)
def test_whatever_is_stored_reads_back_as_it_was(
    make, same, grid, shape, group_size, symmetric, dtype, indexed, activations
):
    packed = make(grid, shape, group_size, symmetric or not isinstance(GRIDS[grid], IntGrid), dtype=dtype)
    if indexed and isinstance(group_size, int):
        index = torch.randint(packed.scale.shape[1], (shape[1],), dtype=torch.int32)
        packed = replace(packed, group_index=index)
    scheme = Scheme.of(packed, activations)
    assert FORMAT.refuses(scheme, shape) is None
    assert FORMAT.adapt(packed) is packed
    config = FORMAT.config({"a": scheme}, [], "0.1")
    [(name, read)] = FORMAT.schemes(json.loads(json.dumps(config)), ["a"]).items()
    assert (name, read) == ("a", scheme)
    same(FORMAT.decode(FORMAT.encode(packed, activations), read), packed)


def test_the_names_and_dtypes_of_the_specification(make):
    packed = replace(make("int3", (5, 40), 16, symmetric=False), group_index=torch.zeros(40, dtype=torch.int32))
    tensors = FORMAT.encode(packed, None)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "weight_packed": (torch.int32, (5, 4)),  # 120 bits
        "weight_scale": (torch.float32, (5, 3)),
        "weight_zero_point": (torch.int8, (5, 3)),
        "weight_g_idx": (torch.int32, (40,)),
    }
    assert set(FORMAT.encode(make("nf4"), None)) == {"weight_packed", "weight_scale"}
    tensors = FORMAT.encode(make("nf4_dq", (40, 40), 4, dtype=torch.bfloat16), None)
    assert (tensors["weight_scale"].dtype, tensors["weight_scale"].shape) == (torch.uint8, (40, 10))
    assert (tensors["weight_scale_shared"].dtype, tensors["weight_scale_shared"].shape) == (torch.float32, (3,))


def test_the_config_names_every_layer_and_the_version():
    schemes = {"a": Scheme(GRIDS["nf4"], 64, True, width=128), "b": Scheme(GRIDS["int4"], "channel", False, width=7)}
    config = FORMAT.config(schemes, ["head"], "1.2.3")
    assert (config["quant_method"], config["version"]) == ("compress", "1.2.3")
    assert config["layers"]["a"] == {
        "grid": "nf4", "group_size": 64, "symmetric": True, "indexed": False, "activations": None, "width": 128,
    }  # fmt: skip
    assert FORMAT.schemes(json.loads(json.dumps(config)), ["a", "b", "head"]) == schemes


def test_without_compressed_layers_there_is_no_config():
    assert FORMAT.config({}, ["head"], "1.2.3") is None


@pytest.mark.parametrize("activations", [None, GRIDS["int8"]])
def test_the_scheme_of_a_packed_layer(make, activations):
    packed = make("int4", (6, 64), 32, symmetric=False)
    assert Scheme.of(packed, activations) == Scheme(GRIDS["int4"], 32, False, False, activations, 64)
    indexed = replace(packed, group_index=torch.zeros(64, dtype=torch.int32))
    assert Scheme.of(indexed, activations).indexed
    assert Scheme.from_json(Scheme.of(indexed, activations).to_json()) == Scheme.of(indexed, activations)


def test_an_unknown_grid_in_a_scheme_is_an_error():
    values = Scheme(GRIDS["int4"], 32, True).to_json()
    with pytest.raises(KeyError, match="int99"):
        Scheme.from_json({**values, "grid": "int99"})


def test_what_is_said_of_inputs_goes_along_and_old_checkpoints_say_nothing():
    usual = Scheme(GRIDS["int8"], "channel", True, width=8)
    full = replace(
        usual, activations=GRIDS["int8"], activation_scale="static", outlier_threshold=6.0, outlier_columns=True,
        input_scaled=True,
    )  # fmt: skip
    assert Scheme.from_json(json.loads(json.dumps(full.to_json()))) == full
    assert FORMAT.refuses(full, (8, 8)) is None
    assert set(usual.to_json()) == {"grid", "group_size", "symmetric", "indexed", "activations", "width"}
    assert Scheme.from_json(usual.to_json()).input_tensors == {}
