"""Block-AP: less error of the block than its start, which is kept otherwise; masks, overrides, rounded inputs, norms."""

import copy

import pytest
import torch

import compress
from compress import GPTQ, RTN, BlockAP, Wanda
from compress.layers.linear import CompressedLinear
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.fake import learned_step
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.rounding import GridOptions
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError
from compress.train.fake_quantized import LearnedSteps

FIRST = "model.layers.0.*"
INT2 = {"weights": "int2", "group_size": 32}


@pytest.fixture(scope="module")
def ids(pico_ids):
    return pico_ids[:, :48]


def distance(model, original, ids):
    with torch.no_grad():
        found, wanted = (m(input_ids=ids, output_hidden_states=True).hidden_states[1] for m in (model, original))
    return float((found - wanted).norm() / wanted.norm())


def applied(model, steps, ids, journal=None):
    return compress.apply(copy.deepcopy(model), steps, calibration=ids, batch=1, journal=journal or Journal())


def layers_of(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, CompressedLinear)}


@pytest.mark.parametrize("start", ["gptq", "rtn"])
def test_the_block_is_nearer_than_at_its_start(start, pico_model, ids):
    plain = {
        "gptq": GPTQ(refine=0, true_sequential=False, targets=FIRST, **INT2),
        "rtn": RTN(scale="mse", targets=FIRST, **INT2),
    }[start]
    learned = applied(pico_model, [BlockAP(start=start, epochs=4, hold_out=0, targets=FIRST, **INT2)], ids)
    rounded = applied(pico_model, [plain], ids)
    assert distance(learned, pico_model, ids) < 0.9 * distance(rounded, pico_model, ids)
    before, after = (dict(model.named_parameters()) for model in (pico_model, learned))
    name = "model.layers.0.post_attention_layernorm.weight"
    assert not torch.equal(before[name], after[name])  # norms are trained, too


def test_at_the_start_the_codes_are_those_of_the_start():
    """learned_step of what was wanted, with the scales of the start, is the start: no weight is at an edge."""
    weight = torch.tensor([[0.9, -2.1, 0.2, 1.4, -0.6, 0.3, 0.0, -1.0]])
    start = quantize(weight, GRIDS["int3"], 4, True, "mse")
    rounding = GridOptions(GRIDS["int3"], 4, True, "mse", torch.float32)
    steps = LearnedSteps(rounding, None, weight, start)
    assert torch.equal(steps(weight), start.dense())
    codes, _ = steps.finalize(weight, torch.float32)
    assert torch.equal(codes.codes, start.codes) and torch.equal(codes.scale, start.scale)
    assert torch.equal(
        steps(weight), learned_step(weight.view(1, 2, 4), start.scale[..., None], None, GRIDS["int3"]).view(1, 8)
    )


def test_where_nothing_is_gained_the_start_is_kept(pico_model, ids):
    journal = Journal()
    wild = BlockAP(weights="int8", group_size=32, learning_rate=30.0, steps=2, warmup=0, targets=FIRST)
    learned = applied(pico_model, [wild], ids, journal)
    start = GPTQ(weights="int8", group_size=32, refine=0, true_sequential=False, normalize_tokens=False, targets=FIRST)
    plain = applied(pico_model, [start], ids)
    for name, layer in layers_of(plain).items():
        assert torch.equal(learned.get_submodule(name).weight, layer.weight)
    for name, parameter in pico_model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, learned.get_parameter(name))
    assert [entry for entry in journal.entries if entry.kind == "fallback" and "initial rounding" in entry.message]


def test_what_was_pruned_stays_pruned_and_the_same_run_gives_the_same_codes(pico_model, ids):
    steps = [Wanda(sparsity=0.5, targets=FIRST), BlockAP(symmetric=False, steps=4, hold_out=0, targets=FIRST, **INT2)]
    first, second = (layers_of(applied(pico_model, steps, ids)) for _ in range(2))
    assert len(first) == 7
    for name, layer in first.items():
        assert layer.mask is not None and (layer.weight[~layer.mask] == 0).all()
        assert torch.equal(layer.weight, second[name].weight)


def test_layers_may_differ_and_inputs_may_be_rounded(pico_model, ids):
    step = BlockAP(steps=2, activations="int8", targets=FIRST, overrides={"*.down_proj": {"weights": "int8"}}, **INT2)
    layers = layers_of(applied(pico_model, [step], ids))
    assert {m.codes.grid.name for n, m in layers.items() if n.endswith("down_proj")} == {"int8"}
    assert {m.codes.grid.name for n, m in layers.items() if n.endswith("up_proj")} == {"int2"}
    assert all(layer.rounding.grid is GRIDS["int8"] for layer in layers.values())


def test_an_expert_without_tokens_in_a_batch_is_no_obstacle(tiny):
    ids = torch.tensor([[3] * 16, [5] * 16, [7] * 16])  # each batch reaches two of four experts
    model = compress.apply(tiny("mixtral"), [BlockAP(weights="int3", group_size=16, steps=3)], ids, batch=1)
    assert all(layer.codes is not None for layer in layers_of(model).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": ["scales"]}, "train must include weights; to learn only scales and norms, use gptq, then lkd"),
        ({"weights": "mxfp4"}, "weights mxfp4: its scales are no plain floats to be learned; use the pass signround"),
        ({"activations": "int8", "activation_scale": "static"}, "is not supported by this pass"),
        ({"start": "awq"}, "'gptq' or 'rtn'"),
        ({"steps": 3, "epochs": 1}, "steps and epochs both set the length"),
        ({"overrides": {"*.up_proj": {"epochs": 3}}}, "epochs"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        BlockAP(**options)
