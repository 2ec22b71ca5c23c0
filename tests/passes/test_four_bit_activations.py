"""Inputs in 4 bits: per token and per group, in every quantizing pass, stored by format native alone."""

import pytest
import torch
from tolerances import CROSSED_LOGITS

import compress
from compress import GPTQ, QAT, RTN, LLMInt8, Rotate
from compress.errors import RecipeError, TargetError
from compress.layers.linear import CompressedLinear
from compress.layers.transforms.rounding import RoundingScheme
from compress.pipeline.plan import plan

NATIVE = {"format": "native"}
GRIDS = ("int4", "mxfp4", "nvfp4")


def schemes(model):
    return {str(m.rounding.scheme.text) for m in model.modules() if isinstance(m, CompressedLinear) and m.rounding}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activations": "int4", "activation_clip": 0.9}, "inputs int4, clipped to 0.9"),
        ({"activations": "int4", "activation_scale": "group"}, "inputs int4 per 32 columns"),
        ({"activations": "mxfp4"}, "inputs mxfp4 per 32 columns"),
        ({"weights": "nvfp4", "group_size": 16, "activations": "nvfp4"}, "inputs nvfp4 per 16 columns"),
    ],
)
def test_a_checkpoint_reads_back_as_it_was_computed(recipe, tmp_path, options, text):
    step = RTN(**{"group_size": 32, **options})
    planned = plan(recipe(step, save=NATIVE))
    report = compress.run(recipe(step, save=NATIVE), tmp_path).report
    assert report["verified"]["own"] <= CROSSED_LOGITS and report["size"]["tensor_bytes"] == planned.checkpoint_bytes
    model, _ = compress.load(tmp_path)
    assert schemes(model) == {text}
    assert [note for note in planned.notes if "stated in format native only, which compress.load reads" in note]


def test_rotation_and_gptq_and_four_bits(recipe, tmp_path):
    chain = [Rotate(online="down_proj"), GPTQ(group_size=32, activations="int4", activation_clip=0.9)]
    report = compress.run(recipe(*chain, save=NATIVE), tmp_path).report
    assert report["verified"]["own"] <= CROSSED_LOGITS
    model, _ = compress.load(tmp_path)
    down = model.get_submodule("model.layers.0.mlp.down_proj")
    assert [t.kind for t in down.all_transforms] == ["hadamard", "rounding"]


@pytest.mark.parametrize("grid", GRIDS)
def test_training_rounds_inputs_as_the_checkpoint_does(pico_model, pico_ids, grid):
    step = QAT(weights="int4", group_size=32, activations=grid, steps=1, activation_clip=0.95)
    compress.apply(pico_model, step, pico_ids[:1], teacher=None)
    wanted = {"int4": None, "mxfp4": 32, "nvfp4": 16}[grid]
    found = {m.rounding.scheme for m in pico_model.modules() if isinstance(m, CompressedLinear) and m.rounding}
    assert {(one.grid.name, one.group, one.clip) for one in found} == {(grid, wanted, 0.95)}


def test_scales_of_weights_may_be_negative_with_inputs_that_no_server_rounds():
    assert GPTQ(activations="int4").tries_signs and not GPTQ(activations="int8").tries_signs


# Bad input


@pytest.mark.parametrize("format_", ["compressed-tensors", "gptq", "gguf", "awq", "bitsandbytes"])
@pytest.mark.parametrize("grid", GRIDS)
def test_formats_of_other_programs_refuse_them(recipe, format_, grid):
    with pytest.raises(TargetError, match="activations|inputs|format: native"):
        plan(recipe(RTN(weights="int4", group_size=32, activations=grid), save={"format": format_}))


@pytest.mark.parametrize("format_", ["compressed-tensors", "bitsandbytes"])
def test_formats_of_other_programs_refuse_clipped_scales(recipe, format_):
    step = RTN(weights="int8", group_size="channel", activations="int8", activation_clip=0.9)
    with pytest.raises(TargetError, match="native"):
        plan(recipe(step, save={"format": format_}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_clip": 0.9}, "activation_clip.*no scale of inputs is computed at run time; leave it out"),
        (
            {"activation_clip": 0.9, "activations": "int8", "activation_scale": "static"},
            "activation_clip.*no scale of inputs is computed at run time",
        ),
        ({"activation_clip": 0.0, "activations": "int4"}, "greater than"),
        ({"activations": "mxfp4", "activation_scale": "static"}, "static: mxfp4 has a scale per group; leave it out"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(RecipeError, match=message):
        compress.Recipe(model="m", passes=[{"rtn": options}])


def test_llm_int8_has_one_scale_per_token():
    with pytest.raises(ValueError, match="mxfp4 has a scale per group, LLM.int8 one per token; use the pass rtn"):
        LLMInt8(activations="mxfp4")


def test_a_width_that_groups_do_not_divide(tiny):
    step = RTN(weights="int4", group_size=8, activations="mxfp4", targets="down_proj")
    with pytest.raises(TargetError, match="groups of 32 columns do not divide its 48 inputs; use activations: int4"):
        compress.apply(tiny("llama"), step)


def test_a_scheme_of_such_inputs_is_plain_json():
    scheme = RTN(activations="nvfp4", activation_clip=0.9).rounding_scheme
    assert scheme is not None and RoundingScheme.from_json(scheme.to_json()) == scheme
    assert scheme.group == 16 and torch.finfo(torch.float32).eps < scheme.clip < 1
