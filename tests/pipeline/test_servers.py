"""What servers demand of a checkpoint: layers that they compute as one are alike, and layers split over devices."""

import pytest
from on_pico import PICO
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import compress
from compress import Recipe
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.opening import open_model
from compress.errors import RecipeError, SeveralErrors, TargetError
from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.grids import GRIDS
from compress.pipeline.plan import plan
from compress.pipeline.resolve import resolve
from compress.pipeline.servers import fused_sets, settled_check


def recipe(save, model=PICO, **options):
    return Recipe(model=str(model), passes=[compress.RTN(**{"group_size": 32} | options)], save=save, eval=None)


@pytest.fixture
def wide(tmp_path):
    """A model whose layers can be split over up to 8 devices."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(PICO).save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def test_linears_of_one_module_that_read_the_same_tensor_are_a_set():
    [sets] = fused_sets(open_model(str(PICO))).values()
    assert sets == [
        tuple(f"self_attn.{name}_proj" for name in "qkv"),
        tuple(f"mlp.{name}_proj" for name in ("gate", "up")),
    ]


@pytest.mark.parametrize("format_", ["compressed-tensors", "gptq", "awq"])
@pytest.mark.parametrize("options", [{"weights": "none"}, {"symmetric": False}])
def test_a_part_of_a_fused_set_that_is_stored_otherwise_is_an_error(format_, options):
    if format_ == "awq" and "symmetric" in options:  # it stores zero points in any case
        options = {"weights": "none"}
    save = {"format": format_, "verify": "own"}
    chosen = recipe(save | {"tensor_parallel": 1}, overrides={"*.v_proj": options})
    if format_ == "gptq" and "symmetric" in options:
        with pytest.raises(SeveralErrors, match="zero points are stored in another version"):
            plan(chosen)
        return
    with pytest.raises(TargetError, match=r"v_proj is stored otherwise than .*q_proj .*compute linears with the same"):
        plan(chosen)
    [note] = [note for note in plan(recipe(save, overrides={"*.v_proj": options})).notes if "servers" in note]
    assert note.endswith("save: {tensor_parallel: 1} makes this an error")


RESHAPED = {
    "rotate": compress.Rotate(),
    "drop_blocks": compress.DropBlocks(count=1),
    "narrow": compress.Narrow(ffn=0.34, multiple=32),
    "slicegpt": compress.SliceGPT(sparsity=0.5, multiple=32),
}


def reshaped(name, save, *unlike):
    """A recipe that changes the shape of the model, then leaves some layers of its second block dense."""
    found = recipe(save | {"verify": "own"}, overrides={f"*.1.{layer}": {"weights": "none"} for layer in unlike})
    return found.model_copy(update={"passes": (RESHAPED[name], *found.passes)})


@pytest.mark.parametrize("format_", ["compressed-tensors", "gptq", "awq"])
@pytest.mark.parametrize("name", RESHAPED)
def test_a_part_of_a_fused_set_of_a_reshaped_model_is_an_error(name, format_):
    with pytest.raises(
        TargetError, match=r"layers\.1\.mlp\.up_proj is stored otherwise than .*give them the same options"
    ):
        plan(reshaped(name, {"format": format_, "tensor_parallel": 1}, "mlp.up_proj"))


def test_without_a_server_it_is_a_note_and_whole_sets_may_differ():
    [note] = [note for note in plan(reshaped("drop_blocks", {}, "mlp.up_proj")).notes if "servers" in note]
    assert note.endswith("save: {tensor_parallel: 1} makes this an error")
    plan(reshaped("drop_blocks", {"tensor_parallel": 1}, "mlp.*"))


def test_whole_sets_and_layers_alone_may_differ():
    overrides = {"*.self_attn.[qkv]_proj": {"weights": "int8"}, "*.down_proj": {"weights": "none"}}
    assert plan(recipe({"verify": "own", "tensor_parallel": 1}, overrides=overrides)).notes == ()


@pytest.mark.parametrize("format_", ["native", "dense"])
def test_formats_that_no_server_fuses_store_any_mixture(format_):
    save = {"format": format_, "tensor_parallel": 1}
    plan(recipe(save, overrides={"*.v_proj": {"weights": "none"}}))


def test_a_group_that_would_be_cut_names_the_layer_and_what_works():
    message = (
        r"tensor_parallel: 2: model.layers.0.mlp.down_proj: 288 inputs do not split into 2 equal parts of whole groups "
        r"or words of 32; these numbers work for all layers: 1; or use a smaller group_size"
    )
    with pytest.raises(TargetError, match=message):
        plan(recipe({"tensor_parallel": 2}))
    plan(recipe({"tensor_parallel": 2}, group_size=16))
    plan(recipe({"tensor_parallel": 2}, group_size="channel"))


def test_heads_that_do_not_split_are_named():
    with pytest.raises(TargetError, match=r"4 attention heads do not split over 3 devices; these numbers .*: 1, 2, 4;"):
        plan(recipe({"tensor_parallel": 3}, group_size="channel", weights="int8"))


def test_heads_of_keys_and_values_are_repeated_on_more_devices(wide):
    plan(recipe({"tensor_parallel": 8}, wide))
    with pytest.raises(TargetError, match=r"512 inputs do not split into 8 equal parts .* 128; .*: 1, 2, 4;"):
        plan(recipe({"tensor_parallel": 8}, wide, group_size=128, targets="*.down_proj"))


def test_a_model_without_a_plan_of_its_own_must_allow_both_ways(wide, monkeypatch):
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", None)
    with pytest.raises(
        TargetError, match=r"gate_proj: 256 inputs do not split into 4 equal parts .* of 128; .*: 1, 2;"
    ):
        plan(recipe({"tensor_parallel": 4}, wide, group_size=128, targets="*.mlp.*"))


@pytest.mark.parametrize(("format_", "reason"), [("bitsandbytes", "does not split"), ("native", "no server reads")])
def test_formats_that_servers_do_not_split_are_refused(format_, reason):
    options = {"weights": "nf4"} if format_ == "bitsandbytes" else {}
    with pytest.raises(TargetError, match=rf"tensor_parallel: 2: .*{reason}.*; write tensor_parallel: 1"):
        plan(recipe({"format": format_, "tensor_parallel": 2}, **options))


@pytest.mark.parametrize("number", [0, -1, "two"])
def test_the_number_of_devices_is_positive(number):
    with pytest.raises(RecipeError, match="tensor_parallel"):
        recipe({"tensor_parallel": number})


@pytest.mark.parametrize(
    ("format_", "grid", "size", "symmetric", "units"),
    [
        ("gptq", "int3", 32, True, (32, 32)),  # zero points of rows, and codes of columns, in whole words
        ("gptq", "int4", "channel", True, (8, 8)),
        ("awq", "int4", 64, False, (8, 64)),
        ("compressed-tensors", "int4", 32, True, (1, 32)),
        ("compressed-tensors", "int3", 16, False, (32, 32)),
        ("compressed-tensors", "nvfp4", 16, True, (1, 16)),
        ("compressed-tensors", "fp8_e4m3", "channel", True, (1, 1)),
    ],
)
def test_groups_and_packed_words_are_not_cut(format_, grid, size, symmetric, units):
    scheme = LayerScheme((64, 64), (CodesScheme(GRIDS[grid], size, symmetric),))
    assert FORMATS[format_].units(scheme) == units


def mixed(by, *before):
    w8a8 = compress.RTN(weights="int8", group_size="channel", activations="int8")
    spared = compress.MixedPrecision(targets="*.self_attn.[qkv]_proj", fraction=0.3, by=by)
    return Recipe(
        model=str(PICO),
        calibration=compress.Calibration(source="embedded", sequences=2, length=32),
        passes=[*before, w8a8, spared],
        save={"tensor_parallel": 1, "verify": "own"},
        eval=None,
    )


@pytest.mark.parametrize("before", [[], [compress.DropBlocks(count=2)]], ids=["all blocks", "fewer blocks"])
def test_a_mixture_that_calibration_decides_is_checked_before_a_shard_is_written(before, tmp_path):
    message = (
        r"save: tensor_parallel: 1: model.layers.0.* is stored otherwise than .*; a pass decided this during the run"
    )
    with pytest.raises(TargetError, match=message):
        compress.run(mixed("layer", *before), tmp_path / "one", progress=False)
    assert not list((tmp_path / "one").glob("*.safetensors"))
    compress.run(mixed("input", *before), tmp_path / "sets", progress=False)
    assert list((tmp_path / "sets").glob("*.safetensors"))


def test_groups_that_calibration_decides_are_checked(wide):
    found = open_model(str(wide))
    check = settled_check(resolve(recipe({"tensor_parallel": 8}, wide), found))
    block, name = "model.layers.0", "model.layers.0.mlp.down_proj"
    check(block, {name: LayerScheme((256, 512), (CodesScheme(GRIDS["int4"], 64),))})
    with pytest.raises(TargetError, match=r"512 inputs do not split into 8 equal parts .* 128"):
        check(block, {name: LayerScheme((256, 512), (CodesScheme(GRIDS["int4"], 128),))})
    assert settled_check(resolve(recipe({}, wide), found)) is None
