"""Grids for widths that super-blocks do not divide, and overrides for some blocks."""

import pytest
from torch import nn

from compress import GPTQ, RTN, Recipe
from compress.errors import RecipeError, TargetError
from compress.models.structure.blocks import Block
from compress.models.structure.select import ModuleNames
from compress.passes.contract.options import SomeBlocks

WIDTHS = {"a": 256, "b": 96}


@pytest.fixture
def names():
    """The names of a model of eight blocks with a linear of 256 inputs and one of 96."""
    root = nn.Module()
    root.layers = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(width, 8) for name, width in WIDTHS.items()}) for _ in range(8)
    )
    root.get_input_embeddings = root.get_output_embeddings = lambda: None
    return ModuleNames.of(root, [Block(i, f"layers.{i}", block) for i, block in enumerate(root.layers)])


def grids(step, names):
    """The grid and the group size of each layer."""
    found = step.on_model(names, "passes[0]")
    own = {name: found.for_layer(name) for name in names.linears}
    return {name: None if each is None else (each.weights, each.group_size) for name, each in own.items()}


def test_the_choice_of_blocks_is_that_of_llama_cpp():
    def more_bits(i, n):  # llama-quant.cpp, use_more_bits
        return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2

    for count in (6, 8, 16, 26, 30, 32, 80):
        chosen = [SomeBlocks(ends=0.125, every=3).takes(i, count) for i in range(count)]
        assert chosen == [more_bits(i, count) for i in range(count)], count
    assert [SomeBlocks(ends=0.25).takes(i, 8) for i in range(8)] == [True, True, *[False] * 4, True, True]


def test_a_fallback_is_for_the_widths_that_do_not_fit(names):
    found = grids(RTN(weights="uint4_k", fallback="int5"), names)
    assert found["layers.3.a"] == ("uint4_k", 32) and found["layers.3.b"] == ("int5", 32)
    step = RTN(weights="uint2_k", fallback="int4").on_model(names, "passes[0]")
    assert step.for_layer("layers.0.a").symmetric is False and step.for_layer("layers.0.b").symmetric is True


def test_overrides_have_fallbacks_of_their_own_and_skipped_layers_none(names):
    blocks = {"ends": 0.125, "every": 3}
    step = GPTQ(
        weights="uint4_k",
        fallback="int5",
        overrides={"b": {"weights": "int6_k", "fallback": "int8", "blocks": blocks}, "layers.1.*": {"weights": "none"}},
    )
    found = grids(step, names)
    assert found["layers.0.b"] == ("int8", 32) and found["layers.3.b"] == ("int8", 32)
    assert found["layers.2.b"] == ("int5", 32) and found["layers.2.a"] == ("uint4_k", 32)
    assert found["layers.1.a"] is None and found["layers.1.b"] is None


def test_overrides_of_another_kind_of_grid_survive_the_resolved_recipe():
    step = {"gptq": {"weights": "uint4_k", "overrides": {"b": {"weights": "int6_k"}, "a": {"weights": "nvfp4"}}}}
    recipe = Recipe(model="m", passes=[step])
    assert Recipe.from_text(recipe.to_yaml()) == recipe
    sixes = recipe.passes[0].for_layer("layers.0.b")
    assert (sixes.weights, sixes.group_size, sixes.symmetric) == ("int6_k", 16, True)


def test_a_pass_without_fallback_does_not_change(names):
    step = RTN(overrides={"a": {"weights": "int8"}})
    assert step.on_model(names, "passes[0]") == step


def test_what_cannot_be_is_told(names):
    with pytest.raises(TargetError, match=r"passes\[0\] overrides: no layer matches a in the chosen blocks"):
        RTN(overrides={"a": {"weights": "int8", "blocks": {}}}).on_model(names, "passes[0]")
    with pytest.raises(RecipeError, match="blocks ends: .*less than or equal to 0.5"):
        RTN(overrides={"a": {"weights": "int8", "blocks": {"ends": 0.6}}})
    with pytest.raises(RecipeError, match="symmetric: true: each group of uint4 has a minimum; leave symmetric out"):
        RTN(weights="uint4", symmetric=True)
    with pytest.raises(RecipeError, match="fallback: grid 'int55' is not known"):
        RTN(weights="uint4_k", fallback="int55")
