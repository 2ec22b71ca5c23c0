"""Inputs rounded with a calibrated scale: what is stored, and that plain transformers computes with it."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import CROSSED_LOGITS, layers_near, near_rounded
from transformers import AutoModelForCausalLM

import compress
from compress.errors import NumericError
from compress.kernels import dispatch
from compress.passes.contract.observers import InputAbsMax

STATIC = {"weights": "int8", "group_size": "channel", "activations": "int8", "activation_scale": "static"}
FLOAT8 = {**STATIC, "weights": "fp8_e4m3", "activations": "fp8_e4m3"}
FLOAT8_TENSOR = {**FLOAT8, "group_size": "tensor"}
LAYER = "model.layers.0.mlp.up_proj"
IDS = torch.arange(64)[None]


@pytest.fixture(scope="module", params=[STATIC, FLOAT8, FLOAT8_TENSOR], ids=["int8", "fp8", "fp8-tensor"])
def folder(recipe, tmp_path_factory, request):
    result = compress.run(recipe(compress.RTN(**request.param)), tmp_path_factory.mktemp("static") / "out")
    assert result.report["verified"]["own"] <= CROSSED_LOGITS and result.report["verified"]["transformers"] is not None
    return result.folder


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_one_scale_per_layer_covers_the_largest_input(folder):
    found = {k: t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}
    scales = {k: t for k, t in found.items() if k.endswith(".input_scale")}
    assert len(scales) == 21 and all(t.shape == (1,) and t.dtype == torch.float32 for t in scales.values())
    assert found["model.layers.0.mlp.up_proj.input_scale"] == found["model.layers.0.mlp.gate_proj.input_scale"]


def test_transformers_rounds_inputs_with_the_stored_scale(folder, tmp_path):
    """transformers 5.23 with compressed-tensors 0.20 rounds inputs, dynamic or static, unless told to dequantize."""
    pytest.importorskip("compressed_tensors")
    ours, theirs = compress.load(folder)[0], AutoModelForCausalLM.from_pretrained(folder)
    with dispatch.plain_torch():  # attention that differs in the last bit rounds other inputs up
        assert near_rounded(logits(theirs), logits(ours)) and layers_near(theirs, ours, IDS)
    for factor in (20, 1 / 20):  # coarse steps; a range that most inputs exceed
        changed = scaled(folder, tmp_path / f"{factor:.2f}", factor)
        ours, theirs = compress.load(changed)[0], AutoModelForCausalLM.from_pretrained(changed)
        with dispatch.plain_torch():
            assert near_rounded(logits(theirs), logits(ours)) and layers_near(theirs, ours, IDS)
        assert not torch.equal(logits(theirs), logits(compress.load(folder)[0]))
        assert not layers_near(theirs, compress.load(folder)[0], IDS)


def scaled(folder, copy, factor):
    """A copy of a checkpoint in which the scale of one layer's inputs is multiplied by a factor."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    for path in copy.glob("*.safetensors"):
        tensors = load_file(path)
        changed = {k: t * factor if k == f"{LAYER}.input_scale" else t for k, t in tensors.items()}
        save_file(changed, path, metadata={"format": "pt"})
    return copy


def test_the_fp8_scale_is_the_largest_input_divided_by_448(pico_model, pico_ids):
    """e4m3 ends at 448; the first layer's input is the output of its norm, whatever is quantized later."""
    seen = []
    hook = pico_model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda module, args: seen.append(float(args[0].abs().max()))
    )
    with torch.no_grad():
        pico_model(input_ids=pico_ids)
    hook.remove()
    compress.apply(pico_model, [compress.RTN(**FLOAT8)], pico_ids, batch=len(pico_ids))
    scale = pico_model.model.layers[0].self_attn.q_proj.rounding.scale
    assert scale.item() == pytest.approx(seen[0] / 448, rel=1e-6)


def test_a_layer_that_no_token_reaches_has_no_scale(layer_of):
    layer = replace(layer_of(), inputs=InputAbsMax(4, torch.device("cpu")))
    with pytest.raises(NumericError, match="no calibration token reached this layer; use activation_scale: token"):
        compress.RTN(**STATIC).rounding(layer)


def test_static_scales_need_a_grid_of_inputs_and_data(pico_model):
    with pytest.raises(
        ValueError,
        match="activation_scale: static needs rounded inputs; write activations: int8, or leave activation_scale out",
    ):
        compress.RTN(activation_scale="static")
    assert compress.RTN(**STATIC).requires.data and not compress.RTN().requires.data
    assert compress.RTN(overrides={"*.up_proj": STATIC}).requires.data
    with pytest.raises(compress.CompressError, match="these passes need token ids"):
        compress.apply(pico_model, [compress.RTN(**STATIC)])


def test_plan_refuses_a_static_scale_where_servers_cannot_read_it(recipe):
    with pytest.raises(compress.CompressError, match="use activation_scale: token, or format: native"):
        compress.plan(recipe(compress.RTN(**{**STATIC, "group_size": 32})))
