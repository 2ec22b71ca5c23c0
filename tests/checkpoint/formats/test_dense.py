"""The dense format: layers are dequantized, so it holds every weight and no rounded activations."""

import pytest
from schemes import coded, layer_of, rounding

from compress.checkpoint.formats import FORMATS
from compress.numerics.quant.grids import GRIDS

FORMAT = FORMATS["dense"]


@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
def test_every_grid_and_group_can_be_stored_multiplied_out(make, grid):
    shape = (5, 30 if grid.block == 1 else grid.block)
    for group_size in (7, "channel", "tensor") if grid.block == 1 else (grid.group_size,):
        assert FORMAT.refuses(coded(grid.name, group_size, not grid.offset, indexed=True)) is None
        assert FORMAT.adapt(layer_of(make(grid.name, shape, group_size, not grid.offset))) is None


@pytest.mark.parametrize("inputs", ["int8", "fp8_e4m3"])
def test_rounded_activations_are_refused_with_what_holds_them(inputs):
    message = FORMAT.refuses(coded("int8", "channel", True, rounding(inputs)))
    assert message == "format dense cannot state that activations are rounded; use format: compressed-tensors"


def test_it_needs_no_config_and_holds_no_codes(make):
    assert FORMAT.config({"a": coded()}, [], "0.1") is None
    assert FORMAT.schemes({}, {"a": (6, 64)}, {}) == {}
    with pytest.raises(AssertionError, match="dequantized before"):
        FORMAT.encode(coded(), [make()], [])
    with pytest.raises(AssertionError, match="dequantized before"):
        FORMAT.tensors(coded())
    with pytest.raises(AssertionError, match="holds no codes"):
        FORMAT.decode({}, coded())


def test_every_format_is_found_by_its_name():
    assert {name: format_.name for name, format_ in FORMATS.items()} == {name: name for name in FORMATS}
    assert {"compressed-tensors", "dense", "native"} <= set(FORMATS)
