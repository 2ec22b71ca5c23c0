"""The native format: every grid and every group, exact both ways, and schemes as plain JSON."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import PERMUTED, SCALED, coded, layer_of, rounding

from compress.checkpoint.formats import FORMATS
from compress.layers.parts.dense import DensePart
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.permutation import InputPermutation
from compress.layers.transforms.rounding import InputRounding
from compress.layers.transforms.scale import Scale
from compress.numerics.quant.grids import GRIDS, IntGrid

FORMAT = FORMATS["native"]


def in_json(scheme):
    """The scheme as a reader of the config has it."""
    config = json.loads(json.dumps(FORMAT.config({"a": scheme}, [], "0.1")))
    return FORMAT.schemes(config, {"a": scheme.shape}, {})["a"]


@st.composite
def transforms(draw, shape):
    """Transforms of the inputs of a layer, each there or not, in their order."""
    width, seed = shape[1], torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = []
    if draw(st.booleans()):
        found.append(InputPermutation.of(torch.randperm(width, generator=seed), shape))
    if draw(st.booleans()):
        found.append(Scale.of(torch.rand(width, generator=seed) + 0.5, shape))
    grid = draw(st.sampled_from([None, GRIDS["int8"], GRIDS["fp8_e4m3"]]))
    if grid is not None:
        scale = torch.tensor([0.25]) if draw(st.booleans()) else None
        columns = torch.rand(width, generator=seed) < 0.5 if draw(st.booleans()) else None
        threshold, symmetric = draw(st.sampled_from([None, 6.0])), draw(st.booleans())
        found.append(InputRounding.of(grid, scale, threshold, columns, symmetric, shape))
    return found


@settings(max_examples=80)
@given(
    data=st.data(),
    grid=st.none() | st.sampled_from(list(GRIDS)),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    group_size=st.sampled_from(["channel", "tensor", 1, 7, 32, 100]),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    indexed=st.booleans(),
    added=st.integers(0, 2),
)
def test_whatever_is_stored_reads_back_as_it_was(make, data, grid, shape, group_size, symmetric, dtype, indexed, added):
    """Codes or floats, further parts, and transforms; the bytes are those that the scheme says."""
    if grid is None:
        part = DensePart.of(torch.randn(shape).to(dtype))
    else:
        kind = GRIDS[grid]
        if kind.block > 1:  # super-blocks take whole columns, in groups of their size
            shape, group_size, indexed = (shape[0], kind.block * (1 + shape[1] % 2)), kind.group_size, False
            symmetric = symmetric or kind.scaling.signed
        symmetric = not kind.offset and (symmetric or not isinstance(kind, IntGrid))
        if isinstance(group_size, int) and kind.group_size is None:
            group_size = min(group_size, shape[1])
        group_size = kind.group_size or group_size
        part = make(grid, shape, group_size, symmetric, dtype=dtype)
        if indexed and isinstance(group_size, int):
            index = (torch.arange(shape[1], dtype=torch.int32) // group_size)[torch.randperm(shape[1])]
            part = type(part).of(part.codes()).changed(layer_of(part).codes, scale=part.scale, zero=part.zero)
            codes = part.codes()
            part = part.changed(type(part.scheme)(codes.grid, group_size, codes.zero is None, True), group_index=index)
    parts = [part, *(DensePart.of(torch.randn(shape).to(dtype)) for _ in range(added))]
    mapped = data.draw(transforms(shape))
    scheme = LayerScheme(shape, tuple(p.scheme for p in parts), tuple(t.scheme for t in mapped))
    assert FORMAT.refuses(scheme) is None
    assert FORMAT.adapt(scheme) is scheme and FORMAT.adapt_part(part) is part
    assert in_json(scheme) == scheme
    tensors = FORMAT.encode(scheme, parts, mapped)
    found, read = FORMAT.decode(tensors, in_json(scheme))
    assert [p.sha256() for p in found] == [p.sha256() for p in parts]
    assert [p.scheme for p in found] == [p.scheme for p in parts]
    assert [t.sha256() for t in read] == [t.sha256() for t in mapped]
    specs = FORMAT.tensors(scheme)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {name: spec.shape for name, spec in specs.items()}
    assert all(spec.dtype in (None, tensors[name].dtype) for name, spec in specs.items())
    stored = {name: t.to(dtype) if name == "input_scale" else t for name, t in tensors.items()}
    if not scheme.plain:
        size = sum(t.numel() * t.element_size() for t in stored.values())
        assert FORMAT.size_bytes(scheme, dtype) == scheme.size_bytes(dtype) == size


def test_the_names_and_dtypes_of_the_specification(make):
    part = make("int3", (5, 40), 16, symmetric=False)
    index = torch.zeros(40, dtype=torch.int32)
    part = part.changed(coded("int3", 16, False, indexed=True).codes, group_index=index)
    tensors = FORMAT.encode(layer_of(part), [part], [])
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "weight_packed": (torch.int32, (5, 4)),  # 120 bits
        "weight_scale": (torch.float32, (5, 3)),
        "weight_zero_point": (torch.int8, (5, 3)),
        "weight_g_idx": (torch.int32, (40,)),
    }
    part = make("nf4")
    assert set(FORMAT.encode(layer_of(part), [part], [])) == {"weight_packed", "weight_scale"}
    part = make("nf4_dq", (40, 40), 4, dtype=torch.bfloat16)
    tensors = FORMAT.encode(layer_of(part), [part], [])
    assert (tensors["weight_scale"].dtype, tensors["weight_scale"].shape) == (torch.uint8, (40, 10))
    assert (tensors["weight_scale_shared"].dtype, tensors["weight_scale_shared"].shape) == (torch.float32, (3,))


def test_the_names_of_transforms_and_of_further_parts():
    scheme = coded("int8", "channel", True, PERMUTED, SCALED, rounding(scale="static", columns=True))
    dense = LayerScheme((6, 64)).parts[0]
    scheme = scheme.with_parts(*scheme.parts, dense, dense)
    assert set(FORMAT.tensors(scheme)) == {
        "weight_packed",
        "weight_scale",
        "dense",
        "dense_2",
        "input_permutation",
        "input_channel_scale",
        "input_scale",
        "input_outliers",
    }


def test_the_config_names_every_layer_and_the_version():
    schemes = {
        "a": coded("nf4", 64, shape=(7, 128)),
        "b": coded("int4", "channel", False, SCALED, rounding(threshold=6.0), shape=(7, 7)),
        "c": LayerScheme((2, 3), transforms=(PERMUTED,)),
    }
    config = FORMAT.config(schemes, ["head"], "1.2.3")
    assert (config["quant_method"], config["version"]) == ("compress", "1.2.3")
    assert config["layers"] == {
        "a": {"shape": [7, 128], "parts": [{"kind": "codes", "grid": "nf4", "group_size": 64}]},
        "b": {
            "shape": [7, 7],
            "parts": [{"kind": "codes", "grid": "int4", "group_size": "channel", "symmetric": False}],
            "transforms": [{"kind": "scale"}, {"kind": "rounding", "grid": "int8", "threshold": 6.0}],
        },
        "c": {"shape": [2, 3], "parts": [{"kind": "dense"}], "transforms": [{"kind": "permutation"}]},
    }
    shapes = {name: scheme.shape for name, scheme in schemes.items()} | {"head": (9, 9)}
    assert FORMAT.schemes(json.loads(json.dumps(config)), shapes, {}) == schemes


def test_without_compressed_layers_there_is_no_config():
    assert FORMAT.config({}, ["head"], "1.2.3") is None


def test_an_unknown_grid_or_kind_in_a_scheme_is_an_error():
    values = coded().to_json()
    for wrong, name in (({"grid": "int99"}, "int99"), ({"kind": "butterfly"}, "butterfly")):
        with pytest.raises(ValueError, match=name):
            LayerScheme.from_json({**values, "parts": [{**values["parts"][0], **wrong}]})
    with pytest.raises(ValueError, match="colour"):
        LayerScheme.from_json({**values, "parts": [{**values["parts"][0], "colour": 3}]})


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("input_permutation", lambda t: torch.zeros_like(t), "does not hold each number below 64 once"),
        ("input_permutation", lambda t: t[:63], r"is torch.int32 \[63\], but it must be torch.int32 \[64\]"),
        ("input_permutation", lambda t: t.long(), "is torch.int64"),
        ("input_channel_scale", lambda t: t[:63], r"is torch.float32 \[63\]"),
        ("input_channel_scale", lambda t: t.bfloat16(), "is torch.bfloat16"),
        ("input_scale", lambda t: t.repeat(2), r"is torch.float32 \[2\]"),
        ("input_scale", lambda t: t.int(), "holds torch.int32, not floats"),
        ("input_outliers", lambda t: t.int(), "is torch.int32"),
        ("weight_packed", lambda t: t[:, :7], r"is torch.int32 \[6, 7\], but it must be torch.int32 \[6, 8\]"),
        ("weight_scale", lambda t: t[:, :1], r"is torch.float32 \[6, 1\]"),
        ("weight_zero_point", lambda t: t.float(), "is torch.float32"),
        ("dense", lambda t: t[:5], r"is torch.float32 \[5, 64\]"),
    ],
)
def test_damage_is_named(make, name, damage, message):
    part, other = make("int4", (6, 64), 16, symmetric=False), DensePart.of(torch.ones(6, 64))
    inputs = InputRounding.of(GRIDS["int8"], torch.ones(1), None, torch.ones(64).bool(), shape=(6, 64))
    mapped = [InputPermutation.of(torch.randperm(64), (6, 64)), Scale.of(torch.ones(64), (6, 64)), inputs]
    scheme = LayerScheme((6, 64), (part.scheme, other.scheme), tuple(t.scheme for t in mapped))
    tensors = FORMAT.encode(scheme, [part, other], mapped)
    FORMAT.read(tensors, scheme)
    with pytest.raises(KeyError, match=name):
        FORMAT.read({n: t for n, t in tensors.items() if n != name}, scheme)
    with pytest.raises(ValueError, match=f"{name} {message}"):
        FORMAT.read({**tensors, name: damage(tensors[name])}, scheme)
