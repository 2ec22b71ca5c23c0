"""What is true of a layer is known layer by layer: several passes may share a model out, but not meet on a layer."""

from types import FunctionType

import pytest
from tolerances import LOGITS

import compress
from compress.errors import RecipeError, TargetError
from compress.layers.parts.pairs import PairsScheme
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import RoundingScheme
from compress.numerics.quant.grids import GRIDS
from compress.passes import PASSES
from compress.passes.contract.facts import Effects
from compress.passes.contract.passes import BlockPass, LayerPass, ModelPass, Pass

ATTENTION = {"weights": "int8", "group_size": "channel", "activations": "int8"}


def mlp(**options):
    return compress.RTN(targets="*.mlp.*", group_size=32, **options)


def test_two_quantizing_passes_may_share_a_model_out(recipe, tmp_path):
    report = compress.run(recipe(mlp(), compress.RTN(targets="*.self_attn.*", **ATTENTION)), tmp_path).report
    assert report["verified"]["layers"] == 21 and report["verified"]["transformers"] <= LOGITS
    model, _ = compress.load(tmp_path)
    assert model.get_submodule("model.layers.0.mlp.up_proj").codes.grid.name == "int4"
    assert model.get_submodule("model.layers.0.self_attn.q_proj").codes.grid.name == "int8"


@pytest.mark.slow
def test_what_an_override_leaves_alone_is_left_for_the_next_pass(recipe, tmp_path):
    first = compress.RTN(group_size=32, overrides={"*.self_attn.*": {"weights": "none"}})
    rest = compress.RTN(targets="*.self_attn.*", **ATTENTION)
    both = compress.run(recipe(first, rest), tmp_path / "a").report
    apart = compress.run(recipe(mlp(), rest), tmp_path / "b").report
    weights = {n: h for n, h in both["files"].items() if n.endswith(".safetensors")}
    assert weights == {n: h for n, h in apart["files"].items() if n.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("passes", "layer"),
    [
        ([mlp(), compress.RTN(targets="*_proj", ignore="*.self_attn.*")], "model.layers.0.mlp.gate_proj"),
        ([mlp(), compress.GPTQ(targets=["*.q_proj", "*.layers.1.mlp.up_proj"])], "model.layers.1.mlp.up_proj"),
        ([mlp(), compress.Wanda(targets="*.down_proj")], "model.layers.0.mlp.down_proj"),
    ],
)
def test_passes_that_meet_are_told_the_layer_and_by_whom_before_weights_are_read(recipe, passes, layer):
    with pytest.raises(TargetError) as raised:
        compress.plan(recipe(*passes))
    assert f"passes[1] {passes[1].key()}: {layer} is already quantized by passes[0] rtn" in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "- rtn\n  - wanda: {targets: '*.mlp.*'}",
        "- rtn: {targets: '*.mlp.*'}\n  - wanda",
        "- rtn: {targets: '*.mlp.*'}\n  - gptq: {targets: '*.mlp.*'}",
        "- rtn: {ignore: '*.mlp.*'}\n  - gptq: {ignore: '*.mlp.*'}",
        "- llm_int8\n  - smoothquant",
    ],
)
def test_passes_that_meet_in_every_model_are_told_without_one(text):
    with pytest.raises(
        RecipeError, match=r"recipe:4:5: .*already quantized by passes\[0\]|quantized twice, by passes\[0\]"
    ):
        compress.Recipe.from_text(f"model: x\npasses:\n  {text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "- rtn: {targets: '*.mlp.*'}\n  - wanda: {targets: '*.self_attn.*'}",
        "- rtn: {ignore: '*.mlp.*'}\n  - rtn: {targets: '*.mlp.*'}",
        "- rtn: {overrides: {'*.mlp.*': {weights: none}}}\n  - rtn: {targets: '*.mlp.*'}",
    ],
)
def test_passes_that_may_not_meet_are_left_to_the_model(text):
    assert len(compress.Recipe.from_text(f"model: x\npasses:\n  {text}\n").passes) == 2


def test_a_model_that_was_quantized_in_memory_is_known_to_be(pico_model, ids):
    compress.apply(pico_model, [mlp()])
    compress.apply(pico_model, [compress.RTN(targets="*.o_proj", group_size=32)])
    with pytest.raises(TargetError, match="model.layers.0.mlp.gate_proj is already quantized in the model that"):
        compress.apply(pico_model, [compress.Wanda(targets="*.mlp.*")], ids())


def test_a_layer_that_reads_the_same_input_as_a_quantized_one_is_not_smoothed(pico_model, ids):
    passes = [compress.RTN(targets="*.k_proj", group_size=32), compress.SmoothQuant(targets="*.q_proj")]
    passes.append(compress.RTN(targets="*.q_proj", group_size=32))
    with pytest.raises(TargetError, match="model.layers.0.self_attn.k_proj is quantized and reads the same"):
        compress.apply(pico_model, passes, ids())


def test_what_a_pass_needs_must_be_true_of_one_of_its_layers(recipe):
    with pytest.raises(RecipeError, match="the model must be given quantized inputs first"):
        recipe(mlp(), compress.MixedPrecision())
    attention = compress.RTN(targets="*.self_attn.*", **ATTENTION)
    with pytest.raises(TargetError, match="none of the 9 linears it works on is given quantized inputs before"):
        compress.plan(recipe(attention, compress.MixedPrecision(targets="*.mlp.*")))
    assert len(compress.plan(recipe(attention, compress.MixedPrecision())).layers) == 21


def test_the_sizes_of_a_pass_have_at_most_twelve_methods():
    """What a pass declares is a value (`Requirements`, `Effects`); a new method is a question to every author."""
    methods = {
        name
        for size in (Pass, LayerPass, BlockPass, ModelPass)
        for name, value in vars(size).items()
        if isinstance(value, FunctionType | property | classmethod) and not name.startswith(("_", "model_"))
    }
    assert {"effects", "requires", "solve", "solve_block", "apply"} <= methods
    assert len(methods) <= 12


@pytest.mark.parametrize("name", PASSES)
def test_at_most_three_classes_stand_between_a_pass_and_the_contract(name):
    """A family with more options is composed of them (`Regularized`, `WeightGrid`, `Pruning`), not a further level."""

    def height(cls):
        return 1 + max(height(base) for base in cls.__bases__ if issubclass(base, Pass)) if cls is not Pass else 0

    assert height(PASSES[name]) - 1 <= 3


def test_transforms_that_may_stay_replace_those_of_their_kind():
    layer = LayerScheme((8, 64))
    effects = Effects(layer.with_transform(RoundingScheme(GRIDS["int8"])), transforms=(RoundingScheme(GRIDS["int4"]),))
    assert effects.scheme.rounding.grid is GRIDS["int8"] and effects.largest_scheme.rounding.grid is GRIDS["int4"]
    assert Effects(layer).largest_scheme == layer


def test_a_layer_is_refused_by_the_pass_or_by_a_part_that_does_not_fit_it():
    odd = LayerScheme((8, 33))
    assert Effects(odd).refusal is None and Effects(odd, problem="no").refusal == "no"
    assert "no pairs" in Effects(odd.with_parts(PairsScheme(32))).refusal
