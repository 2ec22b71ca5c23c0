"""LoRC: the codes stay, and what is added is the best of its rank for the error of the weight, or of the output."""

import json
from dataclasses import replace

import pytest
import torch
from draws import correlated, random, seen_of

import compress
from compress.checkpoint.load import load
from compress.errors import NumericError, RecipeError, TargetError
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.observers import Gram
from compress.passes.contract.options import OptionError
from compress.passes.quantize.lorc import LoRC

INT3 = {"weights": "int3", "group_size": 32}


def solved(step, layer_of, seed=0):
    """(original weight, rounded one, inputs, what was added)."""
    weight, inputs = random(24, 40, seed=seed), correlated()
    rounded = quantize(weight, GRIDS["int3"], 8).dense()
    layer = replace(layer_of(), unquantized=weight)
    solution = step.solve(rounded, seen_of(inputs), layer)
    assert solution.weight is None and solution.mask is None
    (added,) = solution.added
    return weight, rounded, inputs, added


def test_of_the_weight_it_is_the_truncated_svd_of_the_error(layer_of):
    weight, rounded, _, added = solved(LoRC(rank=4, factors="float32", error="weight"), layer_of)
    u, s, v = torch.linalg.svd(weight - rounded, full_matrices=False)
    torch.testing.assert_close(added.dense(torch.float32), (u[:, :4] * s[:4]) @ v[:4])


def test_of_the_output_it_beats_that_of_the_weight_there_and_loses_on_the_weight(layer_of):
    errors = {}
    for error in ("weight", "activation"):
        weight, rounded, inputs, added = solved(LoRC(rank=4, factors="float32", error=error), layer_of)
        left = weight - rounded - added.dense(torch.float32)
        errors[error] = float(left.norm()), float((left @ inputs.T).norm())
    assert errors["activation"][1] < 0.95 * errors["weight"][1]
    assert errors["activation"][0] > errors["weight"][0]


def test_channels_that_are_always_zero_add_no_error(layer_of):
    inputs = correlated()
    inputs[:, ::3] = 0
    layer = replace(layer_of(), unquantized=random(24, 40))
    rounded = quantize(layer.unquantized, GRIDS["int3"], 8).dense()
    error, step = layer.unquantized - rounded, LoRC(rank=4, factors="float32", damping=1e-6, shrinkage=0)
    (added,) = step.solve(rounded, seen_of(inputs), layer).added
    left = ((error - added.dense(torch.float32)) @ inputs.T).norm()
    torch.testing.assert_close(left, torch.linalg.svdvals(error @ inputs.T)[4:].norm(), rtol=1e-3, atol=0)


def test_a_layer_without_tokens_is_an_error_only_if_inputs_count(layer_of):
    layer, unseen = replace(layer_of(), unquantized=random(24, 40)), Gram(40, torch.device("cpu"))
    with pytest.raises(NumericError, match="no calibration token reached this layer"):
        LoRC().solve(random(24, 40, seed=1), unseen, layer)
    assert LoRC(error="weight").solve(random(24, 40, seed=1), unseen, layer).added


@pytest.mark.parametrize("factors", ["int8", "fp8_e4m3", "float16"])
def test_rounded_matrices_do_nearly_as_well(layer_of, factors):
    def left(step):
        weight, rounded, inputs, added = solved(step, layer_of)
        return float(((weight - rounded - added.dense(torch.float32)) @ inputs.T).norm())

    assert left(LoRC(rank=4, factors=factors)) < 1.02 * left(LoRC(rank=4, factors="float32"))


def test_more_rank_leaves_less(layer_of):
    found = []
    for rank in (1, 4, 16):
        weight, rounded, inputs, added = solved(LoRC(rank=rank), layer_of)
        found.append(float(((weight - rounded - added.dense(torch.float32)) @ inputs.T).norm()))
    assert found == sorted(found, reverse=True)


def test_without_the_weight_before_rounding_it_is_an_error(layer_of):
    with pytest.raises(NumericError, match="the weight before rounding is not known"):
        LoRC().solve(random(24, 40), seen_of(correlated()), layer_of())


@pytest.mark.parametrize(
    ("passes", "error", "message"),
    [
        ((LoRC(),), RecipeError, "the model must be quantized first"),
        ((compress.Wanda(), compress.RTN(**INT3), LoRC()), RecipeError, "are already pruned"),
        (
            (compress.RTN(**INT3), compress.Distill(), LoRC()),
            TargetError,
            "no pass right before it quantizes the layer",
        ),
        ((compress.RTN(**INT3), LoRC(rank=64)), TargetError, "rank 64 is not below its 64 outputs"),
    ],
)
def test_a_place_in_the_chain_where_it_cannot_work_is_an_error_before_the_work(recipe, passes, error, message):
    with pytest.raises(error, match=message):
        compress.plan(recipe(*passes, save={"format": "native"}))


def test_a_format_without_it_is_an_error_before_the_work(recipe):
    with pytest.raises(TargetError, match="holds only codes, not int3, group 32 . rank 16 in int8; use format: native"):
        compress.plan(recipe(compress.RTN(**INT3), LoRC()))


def test_options_without_effect_are_errors():
    for option in ("damping", "shrinkage"):
        with pytest.raises(OptionError, match=f"{option} has no effect with error: weight"):
            LoRC(error="weight", **{option: 0.5})


def test_a_run_keeps_the_codes_and_ships_what_apply_makes(recipe, tmp_path, pico_model, pico_ids):
    asked = recipe(compress.GPTQ(**INT3), LoRC(rank=4), save={"format": "native"})
    result = compress.run(asked, tmp_path / "lorc")
    plain = compress.run(recipe(compress.GPTQ(**INT3), save={"format": "native"}), tmp_path / "gptq")
    model, other = load(tmp_path / "lorc")[0], load(tmp_path / "gptq")[0]
    applied = compress.apply(pico_model, [compress.GPTQ(**INT3), LoRC(rank=4)], pico_ids)
    for name, layer in model.named_modules():
        if name.endswith("layers.0.self_attn.q_proj"):
            codes, added = layer.all_parts
            (alone,) = other.get_submodule(name).all_parts
            assert torch.equal(codes.words, alone.words) and torch.equal(codes.scale, alone.scale)
            assert layer.sha256() == applied.get_submodule(name).sha256()
            assert added.scheme.rank == 4
    assert result.report["size"]["tensor_bytes"] == result.report["predicted"]["tensor_bytes"]
    assert result.report["size"]["bits_per_weight"] > plain.report["size"]["bits_per_weight"]
    layers = json.loads((tmp_path / "lorc" / "config.json").read_text())["quantization_config"]["layers"]
    kinds = {tuple(part["kind"] for part in layer["parts"]) for layer in layers.values()}
    assert kinds == {("codes", "low_rank")}
    errors = {r["by"]: r for r in result.report["layers"]}
    assert set(errors) == {"passes[0] gptq", "passes[1] lorc"}
