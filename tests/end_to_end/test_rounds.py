"""A second run on the checkpoint of a first: codes, scales, masks and transforms come back, and stay as they were."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

import compress
from compress import (
    GPTQ,
    LKD,
    RTN,
    ChannelPermutation,
    Distill,
    DropBlocks,
    Finetune,
    KVCache,
    LoRC,
    Magnitude,
    MixedPrecision,
    Wanda,
)
from compress.checkpoint.opening import open_model
from compress.errors import ModelError, RecipeError, TargetError
from compress.layers.linear import CompressedLinear, linears

FEW = {"steps": 2, "batch": 2}
MLP, ATTENTION = "*.mlp.*", "*.self_attn.*"


def weights(folder):
    """The dense weights [out, in] of the linears in the blocks of a checkpoint, by name."""
    model, _ = compress.load(folder)
    found = {n: CompressedLinear.of(m) for n, m in linears(model).items() if n != "lm_head"}
    return {name: layer.weight.float() for name, layer in found.items()}


def sha256_of(folder):
    """The digest of the checkpoint of a run."""
    return json.loads((folder / "report.json").read_text())["checkpoint_sha256"]


def apart(folder, original, ids):
    """||logits - wanted|| / ||wanted|| of a checkpoint and of the model that it was made from."""
    (model, _), wanted = compress.load(folder), AutoModelForCausalLM.from_pretrained(original)
    with torch.no_grad():
        found, wanted = (each(input_ids=ids).logits for each in (model, wanted))
    return float((found - wanted).norm() / wanted.norm())


def codes(folder):
    """The packed codes of the linears of a checkpoint, by name."""
    model, _ = compress.load(folder)
    layers = {n: m for n, m in linears(model).items() if isinstance(m, CompressedLinear) and m.codes is not None}
    return {name: layer.codes.words.clone() for name, layer in layers.items()}


@pytest.fixture(scope="module")
def ran(recipe, tmp_path_factory):
    """ran(name, *passes, **save) -> the folder of a run on pico; equal names share it."""
    made = {}

    def run(name, *passes, **save):
        if name not in made:
            out = tmp_path_factory.mktemp("first") / name
            made[name] = compress.run(recipe(*passes, save={"verify": "own", **save}), out).folder
        return made[name]

    return run


@pytest.fixture
def again(recipe, texts, pico, tmp_path):
    """again(folder, *passes, **save) -> the Result of a second run on a folder."""

    def run(folder, *passes, out="second", masks="keep", **save):
        return compress.run(second(folder, *passes, masks=masks, **save), tmp_path / out)

    def second(folder, *passes, masks="keep", **save):
        asked = recipe(RTN(), save={"verify": "own", **save}, masks=masks)
        return compress.Recipe(**{**dict(asked), "model": str(folder), "passes": passes})

    run.recipe = second
    return run


def notes(result):
    return [entry.message for entry in result.journal.entries if entry.kind == "note"]


@pytest.mark.few(2)
@pytest.mark.parametrize("format_", ["dense", "native"])
@pytest.mark.parametrize("pattern", ["row", "2:4"])
def test_a_second_run_trains_only_what_pruning_has_kept(ran, again, format_, pattern):
    first = ran(f"pruned {format_} {pattern}", Wanda(pattern=pattern), format=format_)
    result = again(first, Finetune(**FEW), format=format_)
    before, after = weights(first), weights(result.folder)
    for name, weight in before.items():
        assert not bool(after[name][weight == 0].any()), name
        assert not torch.equal(after[name], weight), name
    assert sorted(result.report["masked"]) == sorted(before)


MASKS_AS_ZEROS = {
    "dense": ((), {"format": "dense"}),
    "native": ((), {"format": "native", "sparse": "off"}),
    "codes": ((RTN(group_size=32),), {"format": "compressed-tensors"}),
}


@pytest.mark.parametrize("case", MASKS_AS_ZEROS)
def test_masks_belong_to_the_checkpoint_not_to_the_report(case, ran, tmp_path):
    """Fewer zeros than any heuristic finds; only weights, configuration and tokenizer are copied."""
    passes, save = MASKS_AS_ZEROS[case]
    folder = ran(f"masks {case}", Magnitude(sparsity=0.05), *passes, **save)
    left_out = shutil.ignore_patterns("report.*", "recipe.yaml", ".compress", "README.md")
    holds_masks(shutil.copytree(folder, tmp_path / "copy", ignore=left_out))


def holds_masks(folder):
    opened = open_model(str(folder))
    for block in opened.blocks:
        opened.bring(block)
        for name, layer in linears(block.module).items():
            assert layer.mask is not None and bool((layer.weight[~layer.mask] == 0).all()), name
            assert 0.04 < float((~layer.mask).float().mean()) < 0.2


@pytest.mark.parametrize("way", ["save", "export", "save_pretrained", "apply"])
def test_masks_pass_through_a_model_in_memory(way, ran, pico_model, tmp_path):
    """No tensor tells these masks, so each way out of memory has to state them."""
    case = "codes" if way == "export" else "dense"
    passes, save = MASKS_AS_ZEROS[case]
    folder = ran(f"masks {case}", Magnitude(sparsity=0.05), *passes, **save)
    if way == "export":
        compress.export(folder, tmp_path / "out", format="native")
    elif way == "apply":
        compress.apply(pico_model, Magnitude(sparsity=0.05)).save_pretrained(tmp_path / "out")
    elif way == "save":
        compress.save(compress.load(folder)[0], tmp_path / "out", format="dense")
    else:
        compress.load(folder)[0].save_pretrained(tmp_path / "out")
    holds_masks(tmp_path / "out")


def test_a_sparsity_too_small_to_be_found_is_kept(ran, again):
    first = ran("a little", Magnitude(sparsity=0.05), format="dense")
    second = again(first, Finetune(**FEW), format="dense")
    third = again(second.folder, Finetune(**FEW), out="third", format="dense")
    for name, weight in weights(first).items():
        assert not bool(weights(third.folder)[name][weight == 0].any()), name
    (note,) = [text for text in notes(second) if "sparse" in text]
    assert "21 linears of the model are sparse (pruned by an earlier run); pruned weights stay zero" in note


def test_gptq_rounds_the_kept_weights_of_an_earlier_run(ran, again):
    first = ran("pruned dense 2:4", Wanda(pattern="2:4"), format="dense")
    result = again(first, GPTQ(group_size=32), format="native")
    model, _ = compress.load(result.folder)
    for name, weight in weights(first).items():
        layer = model.get_submodule(name)
        assert layer.quantized and torch.equal(layer.mask, weight != 0)
        assert layer.scheme.text == "int4, group 32, 2:4"
    predicted = result.report["predicted"]["tensor_bytes"]
    assert predicted == result.report["size"]["tensor_bytes"]  # the plan knew the masks


@pytest.mark.few(1)
@pytest.mark.parametrize("format_", ["compressed-tensors", "native"])
def test_codes_stay_codes_when_their_scales_are_distilled(ran, again, format_):
    first = ran(f"rounded {format_}", GPTQ(group_size=32, symmetric=False), format=format_)
    result = again(first, Distill(**FEW), format=format_)
    before, after = codes(first), codes(result.folder)
    assert len(before) == 21 and before.keys() == after.keys()
    assert all(torch.equal(words, after[name]) for name, words in before.items())
    old, new = weights(first), weights(result.folder)
    assert any(not torch.equal(old[name], new[name]) for name in old)
    assert result.report["verified"]["layers"] == 21


def test_codes_of_one_format_are_stored_in_another(ran, again):
    first = ran("rounded native", GPTQ(group_size=32, symmetric=False), format="native")
    result = again(first, Finetune(**FEW), format="compressed-tensors")
    config = json.loads((result.folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert all(torch.equal(words, codes(result.folder)[name]) for name, words in codes(first).items())
    dense = again(first, Finetune(**FEW), out="third", format="dense")
    assert any("format dense stores the dequantized weights" in text for text in notes(dense))
    before, after = weights(first), weights(dense.folder)
    assert before.keys() == after.keys()


def test_lkd_trains_the_scales_of_codes_that_an_earlier_run_made(ran, again):
    first = ran("rounded mlp", RTN(targets=MLP, group_size=32), format="native")
    result = again(first, Wanda(targets=ATTENTION), LKD(epochs=1), format="native")
    before, after = codes(first), codes(result.folder)
    assert len(before) == 9 and all(torch.equal(words, after[name]) for name, words in before.items())
    old, new = weights(first), weights(result.folder)
    assert any(not torch.equal(old[name], new[name]) for name in before)


@pytest.mark.few(2)
@pytest.mark.parametrize("format_", ["native", "compressed-tensors"])
def test_lkd_alone_on_codes_is_the_second_half_of_one_run(ran, again, format_):
    rounded, learn = RTN(weights="int3", group_size=32, symmetric=False), LKD(epochs=1)
    first = ran(f"rtn {format_}", rounded, format=format_)
    second, whole = again(first, learn, format=format_), ran(f"rtn lkd {format_}", rounded, learn, format=format_)
    assert second.report["checkpoint_sha256"] == sha256_of(whole)


def test_lkd_alone_on_codes_learns_almost_what_one_run_learns(ran, again, pico, pico_ids):
    """GPTQ calibrates later blocks on other inputs there, so only the first block is the same."""
    paper = {"act_order": "none", "scale": "absmax", "refine": 0, "normalize_tokens": False}  # leaves much to learn
    rounded = GPTQ(weights="int2", group_size=32, **paper)
    learn = LKD(steps=30, learning_rate=0.01)
    first = ran("gptq int2", rounded, format="native")
    second, whole = again(first, learn, format="native"), ran("gptq lkd", rounded, learn, format="native")
    old, new, one = weights(first), weights(second.folder), weights(whole)
    assert all(torch.equal(new[name], one[name]) for name in new if name.startswith("model.layers.0."))
    assert any(not torch.equal(new[name], old[name]) for name in new if name.startswith("model.layers.0."))
    errors = [apart(folder, pico, pico_ids) for folder in (first, second.folder, whole)]
    assert errors[1] < 0.97 * errors[0]
    assert errors[1] == pytest.approx(errors[2], rel=0.1)


def test_lkd_on_the_codes_of_others_has_nothing_to_compare_with(ran, again, tmp_path):
    folder = shutil.copytree(ran("rtn native", RTN(weights="int3", group_size=32), format="native"), tmp_path / "copy")
    (folder / "recipe.yaml").unlink()
    with pytest.raises(TargetError, match=r"passes\[0\] lkd: .*is not known: no run of compress wrote the folder"):
        compress.plan(again.recipe(folder, LKD(), format="native"))


def test_lkd_after_a_change_of_shape_says_which_layer_changed(ran, again):
    first = ran("two blocks", DropBlocks(count=1), RTN(weights="int3", group_size=32), format="native")
    with pytest.raises(TargetError, match=r"the blocks have changed their shape: model\.layers\.2\."):
        compress.plan(again.recipe(first, LKD(), format="native"))


def test_transforms_inputs_and_caches_come_back(ran, again):
    passes = ChannelPermutation(escapes=0, unlinked="keep"), Wanda(pattern="2:4"), KVCache(scale="static")
    first = ran("transformed", *passes, RTN(targets=MLP, weights="int8", activations="int8"), format="native")
    old, _ = compress.load(first)
    result = again(first, Finetune(**FEW, targets=ATTENTION), format="native")
    new, _ = compress.load(result.folder)
    kept = 0
    for name, layer in linears(old).items():
        if isinstance(layer, CompressedLinear):
            found = new.get_submodule(name)
            assert found.scheme == layer.scheme and torch.equal(found.mask, layer.mask)
            kept += len(layer.all_transforms)
            if layer.quantized:
                assert found.sha256() == layer.sha256()
    assert kept > 9  # rounding, and permutations that no layer absorbs
    assert torch.equal(new.model.layers[0].self_attn.k_scale, old.model.layers[0].self_attn.k_scale)
    assert result.report["predicted"]["tensor_bytes"] == result.report["size"]["tensor_bytes"]


def test_the_input_is_the_base_of_the_comparison(ran, again):
    first = ran("pruned native 2:4", Wanda(pattern="2:4"), format="native")
    report = json.loads((first / "report.json").read_text())
    second = again(first, RTN(targets=MLP, group_size=32), format="native").report
    (found,), (base,) = report["perplexity"], second["perplexity"]
    assert base["base"]["perplexity"] == pytest.approx(found["compressed"]["perplexity"], rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("passes", "segment"), [((Finetune(**FEW), RTN(targets=MLP, group_size=32)), 1), ((GPTQ(group_size=32),), 0)]
)
def test_a_second_run_resumes(ran, again, stop, tmp_path, passes, segment):
    first = ran("pruned native 2:4", Wanda(pattern="2:4"), format="native")
    wanted = again(first, *passes, format="native").report["checkpoint_sha256"]
    asked = again.recipe(first, *passes, format="native")
    stop(
        asked,
        tmp_path / "killed",
        lambda e: e.kind == "block" and e.figures["block"] == 1 and e.figures["segment"] == segment,
    )
    assert compress.run(asked, tmp_path / "killed").report["checkpoint_sha256"] == wanted


def test_a_second_run_on_codes_resumes(ran, again, stop, tmp_path):
    first = ran("rounded mlp", RTN(targets=MLP, group_size=32), format="native")
    passes = Wanda(targets=ATTENTION), KVCache()
    wanted = again(first, *passes, format="native").report["checkpoint_sha256"]
    asked = again.recipe(first, *passes, format="native")
    stop(asked, tmp_path / "killed")
    assert compress.run(asked, tmp_path / "killed").report["checkpoint_sha256"] == wanted


# Facts


def test_facts_hold_across_runs(ran, again):
    pruned = ran("pruned dense 2:4", Wanda(pattern="2:4"), format="dense")
    rounded = ran("rounded native", GPTQ(group_size=32, symmetric=False), format="native")
    cached = ran("cached", KVCache(), format="native")
    for folder, step, message in [
        (rounded, Wanda(), "is already quantized in the model that the passes start with"),
        (rounded, RTN(), "is already quantized in the model that the passes start with"),
        (pruned, DropBlocks(count=1), r"is already pruned in the model that the passes start with; .* masks: forget"),
        (pruned, RTN(weights="binary"), "weights binary have no zero"),
        (cached, KVCache(), "is already given a quantized KV cache in the model that the passes start with"),
        (rounded, LoRC(), "no pass right before it quantizes the layer"),
        (rounded, MixedPrecision(), "is given quantized inputs before; put a pass that does so before it"),
    ]:
        with pytest.raises(TargetError, match=message):
            compress.plan(again.recipe(folder, step, format="native"))


def test_a_pass_that_needs_a_fact_finds_it_in_the_model(ran, again):
    first = ran("w8a8", RTN(weights="int8", group_size="channel", activations="int8"), format="native")
    result = again(first, MixedPrecision(fraction=0.1), format="native")
    model, _ = compress.load(result.folder)
    assert {layer.rounding is None for layer in linears(model).values() if isinstance(layer, CompressedLinear)} == {
        True,
        False,
    }


def test_what_the_format_cannot_store_is_known_before_the_run(ran, again):
    first = ran("nf4", RTN(weights="nf4"), format="native")
    with pytest.raises(TargetError, match=r"model: model\.layers\.0\..* is compressed already: weights nf4 have no"):
        compress.plan(again.recipe(first, Finetune(**FEW), format="compressed-tensors"))


# Sparse models of others


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """The folder of pico with half of each row of the attention at zero, 2:4 in its feed-forward."""
    model = AutoModelForCausalLM.from_pretrained(Path(__file__).parents[1] / "pico" / "model")
    for name, layer in linears(model.model.layers).items():
        weight = layer.weight.data
        if "mlp" in name:
            groups = weight.view(-1, 4)
            groups.scatter_(1, groups.abs().argsort(1)[:, :2], 0)
        else:
            weight.scatter_(1, weight.abs().argsort(1)[:, : weight.shape[1] // 2], 0)
    folder = tmp_path_factory.mktemp("sparse") / "model"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(__file__).parents[1] / "pico" / "model" / name, folder)
    return folder


def test_the_zeros_of_a_sparse_model_are_masks(sparse, again):
    result = again(sparse, Finetune(**FEW), format="dense")
    after = weights(result.folder)
    for name, weight in weights(sparse).items():
        assert not bool(after[name][weight == 0].any())
    found = [text for text in notes(result) if "are sparse" in text]
    assert sorted(text.partition(";")[0] for text in found) == [
        "12 linears of the model are sparse (50.0% zeros)",
        "9 linears of the model are sparse (50.0% zeros, 2:4)",
    ]
    assert any("model.layers.0.self_attn.q_proj" in text for text in found)
    opened = open_model(str(sparse))
    assert compress.plan(again.recipe(sparse, RTN())).layers[0].scheme.quantized
    assert opened.fingerprint != open_model(str(sparse), masks="forget").fingerprint


def test_masks_may_be_forgotten(sparse, again):
    result = again(sparse, Finetune(**FEW), masks="forget", format="dense")
    before, after = weights(sparse), weights(result.folder)
    assert all(bool(after[name][weight == 0].any()) for name, weight in before.items())
    assert result.report["masked"] == []
    assert any("zeros are ordinary weights now (masks: forget)" in text for text in notes(result))


def test_masks_of_kept_weights_may_be_forgotten(ran, again):
    first = ran("pruned native 2:4", Wanda(pattern="2:4"), format="native")
    after = weights(again(first, Finetune(**FEW), masks="forget", format="native").folder)
    assert all(bool(after[name][weight == 0].any()) for name, weight in weights(first).items())


@pytest.mark.parametrize("masks", ["keep", "forget"])
def test_a_sparse_model_in_memory(sparse, pico_ids, masks):
    model, before = AutoModelForCausalLM.from_pretrained(sparse), weights(sparse)
    compress.apply(model, [Finetune(**FEW)], pico_ids, masks=masks)
    for name, weight in before.items():
        layer = CompressedLinear.of(model.get_submodule(name))
        assert bool(layer.weight[weight == 0].any()) == (masks == "forget")


def test_few_zeros_are_no_mask(pico, tmp_path):
    folder = Path(shutil.copytree(pico, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][:, :20] = 0  # 16%
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    opened = open_model(str(folder))
    assert opened.notes == []
    tensors["model.layers.0.mlp.up_proj.weight"][:100] = 0  # unused channels
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert open_model(str(folder)).notes == []


# The uncompressed model


def test_the_teacher_of_a_second_run_is_the_model_that_the_first_began_with(ran, again, pico_ids):
    first = ran("rounded native", GPTQ(group_size=32, symmetric=False), format="native")
    result = again(first, Distill(**FEW, top_k=None), format="native")
    (record,) = result.report["training"].values()
    assert record["curve"][0]["loss"] > 1e-4  # a model compared with itself has no loss


def test_a_teacher_that_is_gone(recipe, pico, again, tmp_path):
    dense = shutil.copytree(pico, tmp_path / "dense")
    first = compress.run(again.recipe(dense, RTN(group_size=32), format="native"), tmp_path / "first").folder
    shutil.rmtree(dense)
    with pytest.raises(
        ModelError, match=r"distill: the uncompressed model of .* is .*dense by its recipe\.yaml, which"
    ):
        again(first, Distill(**FEW), format="native")
    again(first, Distill(**FEW, teacher=str(pico)), format="native")


def test_logits_of_an_opened_checkpoint(ran, pico_ids):
    for name, step, format_ in [
        ("rounded compressed-tensors", GPTQ(group_size=32, symmetric=False), "compressed-tensors"),
        ("pruned native 2:4", Wanda(pattern="2:4"), "native"),
    ]:
        folder = ran(name, step, format=format_)
        model, _ = compress.load(folder)
        with torch.no_grad(), open_model(str(folder)).streaming() as streamed:
            for _ in range(2):  # blocks are loaded again
                found = streamed(input_ids=pico_ids[:1]).logits
        with torch.no_grad():
            assert float((found - model(input_ids=pico_ids[:1]).logits).abs().max()) <= LOGITS


def test_a_head_of_another_shape_is_refused(ran, tmp_path):
    first = ran("rounded native", GPTQ(group_size=32, symmetric=False), format="native")
    folder = Path(shutil.copytree(first, tmp_path / "head"))
    config = json.loads((folder / "config.json").read_text())
    layers = config["quantization_config"]["layers"]
    layers["lm_head"] = layers["model.layers.0.self_attn.q_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"lm_head is \[128, 128\] in the checkpoint, but \[1024, 128\] by its config.json"
    ):
        open_model(str(folder))


def test_a_recipe_for_a_model_of_the_hub_must_be_in_order():
    with pytest.raises(RecipeError, match="the model must be given quantized inputs first"):
        compress.Recipe(model="someone/model", passes=[MixedPrecision()])
