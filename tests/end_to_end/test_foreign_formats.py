"""The formats of other programs on the whole road: a recipe writes them, and they are the model of another recipe."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import LOGITS

import compress
from compress.errors import ModelError, TargetError
from compress.layers.linear import CompressedLinear

PICO = Path(__file__).parents[1] / "pico" / "model"
CASES = {
    "gptq": {"gptq": {"weights": "int4", "group_size": 32, "act_order": "group"}},
    "awq": {"rtn": {"weights": "int4", "group_size": 32, "symmetric": False}},
    "bitsandbytes": {"llm_int8": {}},
    "bitsandbytes nf4": {"rtn": {"weights": "nf4_bnb_dq", "group_size": 32}},
}


def recipe(model, passes, form):
    save = {"format": form}
    calibration = {"source": "embedded", "sequences": 4, "length": 32}
    return compress.Recipe.from_data({"model": str(model), "passes": passes, "calibration": calibration, "save": save})


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """ran(case) -> the result of its recipe."""
    made = {}

    def run(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("ran")
            made[case] = compress.run(recipe(PICO, [CASES[case]], case.split()[0]), folder, progress=False)
        return made[case]

    return run


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_a_recipe_writes_it_and_says_that_its_owner_was_not_asked(case, ran):
    result = ran(case)
    verified = result.report["verified"]
    assert verified["layers"] == 21 and verified["own"] <= LOGITS and verified["transformers"] is None
    assert f"transformers reads format {case.split()[0]} with the package" in verified["skipped"]
    config = json.loads((result.folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == case.split()[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_of_another_recipe_that_keeps_its_codes(case, ran, tmp_path):
    source = ran(case).folder
    passes = [{"kv_cache": {}}]
    again = compress.run(recipe(source, passes, "native"), tmp_path / "again", progress=False)
    before, after = compress.load(source)[0], compress.load(again.folder)[0]
    for name, layer in before.named_modules():
        if isinstance(layer, CompressedLinear):
            found = after.get_submodule(name)
            assert torch.equal(layer.codes.words, found.codes.words), name
            assert torch.equal(layer.weight_as(torch.float32), found.weight_as(torch.float32)), name


def test_a_dense_copy_of_it_is_written_where_floats_are_needed(ran, tmp_path):
    folder = compress.export(ran("awq").folder, tmp_path / "dense", "dense") and tmp_path / "dense"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def broken_copy(folder, out, change):
    """A copy of a checkpoint with one change of its tensors."""
    out.mkdir()
    for path in Path(folder).iterdir():
        if path.is_file():
            (out / path.name).write_bytes(path.read_bytes())
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    return out


def test_a_missing_tensor_is_named(ran, tmp_path):
    def without(tensors):
        tensors.pop("model.layers.1.mlp.up_proj.qzeros", None)

    with pytest.raises(
        ModelError, match=r"model.layers.1.mlp.up_proj lacks its tensor qzeros .*; write the checkpoint"
    ):
        compress.load(broken_copy(ran("gptq").folder, tmp_path / "broken", without))


def test_a_group_out_of_range_is_named(ran, tmp_path):
    def beyond(tensors):
        if "model.layers.1.mlp.up_proj.g_idx" in tensors:
            tensors["model.layers.1.mlp.up_proj.g_idx"] += 1

    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.g_idx holds groups 1 to 4, but there are 4"):
        compress.load(broken_copy(ran("gptq").folder, tmp_path / "broken", beyond))


def test_words_of_another_width_are_named(ran, tmp_path):
    def cut(tensors):
        name = "model.layers.0.mlp.down_proj.qweight"
        if name in tensors:
            tensors[name] = tensors[name][:7].clone()

    with pytest.raises(ModelError, match=r"quantization_config .*down_proj.qweight has 7 words for 288 inputs"):
        compress.load(broken_copy(ran("gptq").folder, tmp_path / "broken", cut))


def test_layers_that_cannot_share_a_checkpoint_are_refused_before_the_run(tmp_path):
    mixed = {"rtn": {"weights": "int4", "group_size": 32, "overrides": {"*.down_proj": {"group_size": "channel"}}}}
    with pytest.raises(TargetError, match="save: format awq has one group size for all layers, not 32, channel"):
        compress.plan(recipe(PICO, [mixed], "awq"))
    zeros = {"rtn": {"weights": "int4", "group_size": 32, "overrides": {"*.down_proj": {"symmetric": False}}}}
    with pytest.raises(TargetError, match="another version of format gptq"):
        compress.plan(recipe(PICO, [zeros], "gptq"))


def test_the_plan_counts_its_bytes_and_scales_have_the_dtype_of_the_format(ran):
    for case in CASES:
        found = ran(case).report
        assert found["size"]["tensor_bytes"] == found["predicted"]["tensor_bytes"]
    tensors = {}
    for path in Path(ran("gptq").folder).glob("*.safetensors"):
        tensors |= load_file(path)
    assert {t.dtype for n, t in tensors.items() if n.endswith(".scales")} == {torch.float16}
