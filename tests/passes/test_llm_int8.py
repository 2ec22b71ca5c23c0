"""LLM.int8: holds on a model with planted outlier channels where plain W8A8 fails; which columns are spared."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draws import random
from tolerances import CROSSED_LOGITS
from transformers import AutoModelForCausalLM

import compress
from compress.errors import NumericError, TargetError
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.observers import Nothing, OutlierFrequency
from compress.passes.contract.options import OptionError
from compress.passes.quantize.llm_int8 import LLMInt8

PICO = Path(__file__).parents[1] / "pico" / "model"
INT8 = GRIDS["int8"]
W8A8 = {"weights": "int8", "group_size": "channel", "activations": "int8"}


def planted():
    """The pico model with two input channels of every norm a hundred times as large."""
    model = AutoModelForCausalLM.from_pretrained(PICO).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter[[3, 17]] *= 100
    return model


def divergence(model, base):
    """Mean KL divergence of next-token distributions from those of the base model, in nats."""
    ids = torch.arange(128).reshape(2, 64) % 256
    with torch.no_grad():
        wanted, found = (m(input_ids=ids).logits.log_softmax(-1) for m in (base, model))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize("outliers", ["runtime", "calibrated"])
def test_it_holds_with_outliers_where_plain_w8a8_fails(outliers, ids):
    calibration = torch.arange(256).reshape(4, 64)
    plain = divergence(compress.apply(planted(), [compress.RTN(**W8A8)]), planted())
    weights = divergence(compress.apply(planted(), [compress.RTN(weights="int8", group_size="channel")]), planted())
    split = divergence(compress.apply(planted(), [LLMInt8(outliers=outliers)], calibration), planted())
    assert split < 0.25 * plain
    assert split < 1.5 * weights  # what is left is the weights' rounding


def seen_of(rows, threshold=6.0):
    seen = OutlierFrequency(rows.shape[1], torch.device("cpu"), threshold)
    seen.update(rows)
    return seen


def solve(step, weight, layer):
    return step.solve(weight, Nothing(weight.shape[1], torch.device("cpu")), layer)


def test_weights_are_rounded_per_row_and_the_threshold_goes_along(layer_of):
    weight = random(5, 16)
    solution = solve(LLMInt8(threshold=4.0), weight, layer_of())
    assert torch.equal(solution.weight.codes, quantize(weight, INT8).codes)
    [rounding] = solution.transforms
    assert (rounding.grid, rounding.threshold) == (INT8, 4.0)
    assert rounding.columns is None


def test_calibrated_columns_are_those_that_enough_tokens_reach(layer_of, notes):
    rows = random(10, 8).clamp(-3, 3)
    rows[0, 2], rows[:5, 5] = -6.0, 7.0  # one token in ten, exactly at the threshold; five in ten
    layer = replace(layer_of(), inputs=seen_of(rows))
    found = [
        solve(LLMInt8(outliers="calibrated", token_share=share), random(4, 8), layer).transforms[0]
        for share in (0.0, 0.1, 0.5)
    ]
    assert [f.columns.nonzero().flatten().tolist() for f in found] == [[2, 5], [5], []]
    assert all(f.threshold is None for f in found)
    assert [figures["columns"] for _, _, figures in notes] == [2, 1, 0]


def test_weights_of_the_columns_with_most_outliers_stay_in_16_bits(layer_of):
    """Column 5 in half of the tokens, column 2 in one of ten; a third has none, so it is the first of the rest."""
    rows, weight = random(10, 8).clamp(-3, 3), random(4, 8)
    rows[0, 2], rows[:5, 5] = -6.0, 7.0
    weight[:, 5] *= 100  # no scale needs to cover it
    layer = replace(layer_of(), inputs=seen_of(rows))
    solution = solve(LLMInt8(outliers="calibrated", float_columns=3), weight, layer)
    codes, outliers = solution.weight
    assert outliers.columns.tolist() == [0, 2, 5] and outliers.dtype == torch.float16
    assert torch.equal(outliers.values, weight[:, [0, 2, 5]].half())
    rest = [1, 3, 4, 6, 7]
    wanted = quantize(weight.index_fill(1, torch.tensor([0, 2, 5]), 0), INT8).dense()
    assert torch.equal(codes.dense(torch.float32), wanted) and not wanted[:, [0, 2, 5]].any()
    assert float((wanted - weight)[:, rest].abs().max()) < 0.02
    assert solution.transforms[0].columns.nonzero().flatten().tolist() == [0, 2, 5]
    again = solve(LLMInt8(outliers="calibrated", float_columns=1), weight, layer)
    assert again.transforms[0].columns.nonzero().flatten().tolist() == [2, 5], "column 2 multiplies dequantized codes"


def test_it_is_better_than_dequantized_outliers_and_is_read_back(recipe, tmp_path):
    step = LLMInt8(outliers="calibrated", float_columns=2)
    calibration, found = torch.arange(256).reshape(4, 64), []
    for each in (LLMInt8(outliers="calibrated"), step):
        found.append(divergence(compress.apply(planted(), [each], calibration), planted()))
    assert found[1] < found[0]
    asked = recipe(step, save={"format": "native"})
    planned, report = compress.plan(asked), compress.run(asked, tmp_path).report
    assert report["verified"]["own"] <= CROSSED_LOGITS and report["size"]["tensor_bytes"] == planned.checkpoint_bytes
    layer = compress.load(tmp_path)[0].get_submodule("model.layers.0.mlp.up_proj")
    assert [part.kind for part in layer.parts] == ["codes", "outliers"]


def test_without_tokens_nothing_can_be_calibrated(layer_of):
    layer = replace(layer_of(), inputs=seen_of(torch.empty(0, 8)))
    with pytest.raises(NumericError, match="no calibration token reached this layer; use outliers: runtime"):
        solve(LLMInt8(outliers="calibrated"), random(4, 8), layer)


@pytest.mark.parametrize("outliers", ["runtime", "calibrated"])
def test_the_native_checkpoint_holds_it(recipe, outliers, tmp_path):
    step = LLMInt8(outliers=outliers, threshold=4.0)
    report = compress.run(recipe(step, save={"format": "native"}), tmp_path).report
    assert report["verified"]["own"] <= CROSSED_LOGITS
    layer = compress.load(tmp_path)[0].get_submodule("model.layers.0.mlp.up_proj")
    assert layer.rounding.threshold == (4.0 if outliers == "runtime" else None)
    assert (layer.rounding.columns is not None) == (outliers == "calibrated")
    if outliers == "calibrated":
        assert layer.rounding.columns.dtype == torch.bool and 0 < int(layer.rounding.columns.sum()) < layer.shape[1]


@pytest.mark.parametrize(
    ("format_", "message"), [("compressed-tensors", "use format: native"), ("dense", "activations")]
)
def test_formats_that_cannot_say_it_are_refused_before_the_work(recipe, format_, message):
    with pytest.raises(TargetError, match=message):
        compress.plan(recipe(LLMInt8(), save={"format": format_}))


def test_only_calibrated_outliers_need_data(pico_model):
    assert not LLMInt8().requires.data and LLMInt8(outliers="calibrated").requires.data
    compress.apply(pico_model, [LLMInt8()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "none"}, "activations: none rounds no inputs, so outliers have no effect; use the pass rtn"),
        ({"activation_scale": "static"}, "activation_scale: static is not possible"),
        ({"token_share": 0.1}, "token_share needs outliers: calibrated"),
        ({"threshold": 0}, "greater than 0"),
        ({"float_columns": 2}, "float_columns needs outliers: calibrated"),
        ({"outlier_dtype": "bfloat16"}, "outlier_dtype has no effect with float_columns: 0"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        LLMInt8(**options)
