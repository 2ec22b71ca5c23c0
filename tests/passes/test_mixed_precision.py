"""Mixed precision: which layers keep unrounded inputs, by hand and on a model; and the checkpoint that follows."""

import copy
import math

import pytest
import torch
from tolerances import CROSSED_LOGITS
from torch import nn

import compress
from compress.errors import NumericError
from compress.layers.linear import CompressedLinear
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.options import OptionError
from compress.passes.quantize.mixed_precision import MixedPrecision, signal_to_noise

INT8 = GRIDS["int8"]
W8A8 = {"weights": "int8", "group_size": "channel", "activations": "int8"}


def layer(grid=INT8, scale=None):
    found = CompressedLinear.of(nn.Linear(2, 2, bias=False))
    found.put(torch.eye(2))
    found.round_inputs(InputRounding.of(grid, scale))
    return found


def test_signal_to_noise_by_hand():
    rows = torch.tensor([[10.0, 0.0], [0.0, 10.1]])  # 0.1 is lost of 10 and 10.1
    found = signal_to_noise(layer(scale=torch.tensor([1.0])), rows, "a")
    assert found == pytest.approx(20 * math.log10(math.hypot(10, 10.1) / 0.1), abs=1e-3)
    assert signal_to_noise(layer(scale=torch.tensor([1.0])), torch.tensor([[3.0, -4.0]]), "a") == math.inf


def test_without_tokens_a_layer_cannot_be_judged():
    with pytest.raises(NumericError, match="a: no calibration token reached this layer"):
        signal_to_noise(layer(), None, "a")


@pytest.mark.parametrize(
    ("options", "worst"),
    [
        ({}, ["b"]),
        ({"threshold": 31}, ["a", "b"]),
        ({"threshold": 10}, []),
        ({"fraction": 0.1}, ["b"]),
        ({"fraction": 0.5}, ["b", "a"]),
        ({"fraction": 1}, ["b", "a", "d", "c"]),
    ],
)
def test_the_worst_are_below_the_threshold_or_first_in_the_ranking(options, worst):
    ratios = {"a": 30.0, "b": 12.0, "c": 50.0, "d": 31.0}
    assert MixedPrecision(**options).worst(ratios) == worst


def rounded(model):
    return {n for n, m in model.named_modules() if isinstance(m, CompressedLinear) and m.rounding is not None}


def test_the_worst_layer_of_every_block_keeps_its_inputs_and_the_report_says_how_bad_all_are(recipe, tmp_path):
    passes = (compress.RTN(**W8A8), MixedPrecision(fraction=0.1))
    report = compress.run(recipe(*passes), tmp_path).report
    assert report["verified"]["own"] <= CROSSED_LOGITS and report["verified"]["transformers"] is not None
    model, _ = compress.load(tmp_path)
    spared = {n for n, m in model.named_modules() if isinstance(m, CompressedLinear)} - rounded(model)
    notes = [e for e in report["journal"]["entries"] if "signal_to_noise_db" in e["figures"]]
    assert len(notes) == 21 and len(spared) == 3
    for block in range(3):
        mine = [e for e in notes if e["where"].endswith(f"layers.{block}")]
        worst = min(mine, key=lambda e: e["figures"]["signal_to_noise_db"])
        name, _, outcome = worst["message"].partition(": ")
        assert f"model.layers.{block}.{name}" in spared and outcome == "inputs stay in 16 bits"
    predicted, size = report["predicted"]["tensor_bytes"], report["size"]["tensor_bytes"]
    assert size == predicted + 3 * 16  # the packed layout of the three stores its shape


def test_a_planted_outlier_is_found_and_sparing_it_helps(pico_model, ids):
    """One channel of one norm a hundred times as large, its columns a hundred times as small: the same function."""
    block = pico_model.model.layers[1]
    block.post_attention_layernorm.weight.data[7] *= 100
    for linear in (block.mlp.gate_proj, block.mlp.up_proj):
        linear.weight.data[:, 7] /= 100
    calibration = torch.arange(256).reshape(4, 64)
    model = compress.apply(pico_model, [compress.RTN(**W8A8), MixedPrecision(threshold=25)], calibration)
    names = {name for name, module in model.named_modules() if isinstance(module, CompressedLinear)}
    assert names - rounded(model) == {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"}


def test_only_its_targets_are_spared(pico_model):
    passes = [compress.RTN(**W8A8), MixedPrecision(targets="*.q_proj", threshold=1000)]
    model = compress.apply(pico_model, passes, torch.arange(256).reshape(4, 64))
    names = {name for name, module in model.named_modules() if isinstance(module, CompressedLinear)}
    assert names - rounded(model) == {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}


def test_layers_that_read_the_same_input_are_decided_together(pico_model):
    spared = {}
    for by in ("layer", "input"):
        passes = [compress.RTN(**W8A8), MixedPrecision(targets="*.self_attn.*", fraction=0.25, by=by)]
        model = compress.apply(copy.deepcopy(pico_model), passes, torch.arange(256).reshape(4, 64))
        names = {name for name, module in model.named_modules() if isinstance(module, CompressedLinear)}
        spared[by] = names - rounded(model)
    assert len(spared["layer"]) == 3  # the worst of four in each of three blocks
    sets = [{n for n in spared["input"] if f".{block}." in n} for block in range(3)]
    for block, found in enumerate(sets):
        assert len(found) in (1, 3) and spared["layer"] & found
        if len(found) == 3:
            assert found == {f"model.layers.{block}.self_attn.{name}_proj" for name in "qkv"}
    assert any(len(found) == 3 for found in sets)


def test_two_ways_to_choose_are_one_too_many():
    with pytest.raises(OptionError, match="threshold and fraction exclude each other"):
        MixedPrecision(threshold=20, fraction=0.1)
