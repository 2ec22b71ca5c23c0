"""The input embedding and the output head as targets: tied and untied, in runs, checkpoints, chains and resumption."""

import copy
import json

import pytest
import torch
from tolerances import LOGITS, same_logits

import compress
from compress.checkpoint.formats import FORMATS
from compress.errors import ModelError, TargetError
from compress.kernels.dispatch import plain_torch
from compress.layers.embedding import CompressedEmbedding, layer_of
from compress.models.structure.ends import find_ends
from compress.pipeline.resolve import resolve_passes

BOTH = ["lm_head", "embed_tokens"]
INT8 = {"weights": "int8", "group_size": "channel"}
FAMILIES = ("llama", "qwen2", "gpt2", "opt", "gpt-neox", "gemma2", "bloom", "bert")
EVERYWHERE = ["*", *BOTH]


def step(**options):
    return compress.RTN(**{"targets": BOTH, **INT8, **options})


def ends_of(model):
    return {end.name: layer_of(model.get_submodule(end.name)) for end in find_ends(model)}


def dense_twin(model, dense):
    """The dense model with the dequantized weights of the ends of `model`."""
    for end in find_ends(dense):
        weight = layer_of(model.get_submodule(end.name)).weight
        for name in end.names:
            dense.get_submodule(name).weight.data = weight.clone()
    return dense


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_every_family_are_quantized_whatever_they_are_called(family, tiny, ids, tmp_path):
    model = tiny(family)
    dense, tokens = copy.deepcopy(model), ids()
    tied = len(find_ends(model)) == 1
    compress.apply(model, step())
    quantized = ends_of(model)
    assert all(layer.quantized for layer in quantized.values()) and len(quantized) == (1 if tied else 2)
    assert isinstance(model.get_input_embeddings(), CompressedEmbedding)
    assert (model.get_input_embeddings().table is model.get_output_embeddings()) == tied
    with plain_torch():
        wanted = dense_twin(model, dense)(input_ids=tokens).logits
        assert same_logits(model(input_ids=tokens).logits, wanted)
        again, _ = compress.load(compress.save(model, tmp_path / "saved"))
        assert same_logits(again(input_ids=tokens).logits, wanted)
    assert {n: layer.sha256() for n, layer in ends_of(again).items()} == {n: x.sha256() for n, x in quantized.items()}
    assert (again.get_input_embeddings().table is again.get_output_embeddings()) == tied
    with pytest.raises(compress.CompressError, match="use compress.save"):
        model.save_pretrained(tmp_path / "stock")
    back = compress.load(compress.save(model, tmp_path / "dense", format="dense"))[0]
    assert float((back(input_ids=tokens).logits - wanted).abs().max()) <= LOGITS


@pytest.mark.parametrize("weights", ["int4", "nf4", "fp8_e4m3"])
def test_a_run_with_tied_ends_is_verified_and_its_bytes_are_those_of_the_plan(weights, recipe, tmp_path, pico_ids):
    blocks = compress.GPTQ(weights="int4", group_size=32)
    built = recipe(blocks, step(weights=weights, group_size=32), save={"format": "native"})
    planned = compress.plan(built)
    result = compress.run(built, tmp_path / "out", progress=False)
    size, layers = result.report["size"], {layer["layer"]: layer for layer in result.report["layers"]}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert planned.checkpoint_bytes == index["metadata"]["total_size"]
    assert size["compressed_layers"] == len(planned.layers) and planned.layers[-1].name == "lm_head"
    assert 0 < layers["lm_head"]["error"] < 0.2 and layers["lm_head"]["by"] == "passes[1] rtn"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] and config["quantization_config"]["layers"]["lm_head"]["role"] == "tied"
    model, _ = compress.load(tmp_path / "out")
    names = [name for name in model.state_dict() if name.startswith(("lm_head", "model.embed_tokens"))]
    assert all(name.startswith("lm_head.parts") for name in names)  # one packed tensor serves both
    made = model.generate(input_ids=pico_ids[:1, :8], max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 12)


def test_a_killed_run_resumes_to_the_same_bytes(recipe, stop, tmp_path, manifest_of):
    steps = (step(weights="int4"), compress.RTN(group_size=32), compress.Distill(train=["norms"], steps=2))
    built = recipe(*steps, save={"format": "native"}, eval=None)
    compress.run(built, tmp_path / "whole", progress=False)
    stop(built, tmp_path / "killed")
    compress.run(built, tmp_path / "killed", progress=False)
    for name in sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors")):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    results = [r["layer"] for r in manifest_of(tmp_path / "killed")["shards"]["outside"]["results"]]
    assert results == ["lm_head"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_with_compressed_ends_is_trained_in_float32_and_computes_as_before(family, tiny, ids):
    model, tokens = tiny(family).bfloat16(), ids()
    compress.apply(model, step())
    digests = {name: layer.sha256() for name, layer in ends_of(model).items()}
    compress.apply(model, compress.Finetune(train=["norms"], steps=1), tokens)
    assert {name: layer.sha256() for name, layer in ends_of(model).items()} == digests
    assert model.get_input_embeddings()(tokens).dtype == torch.bfloat16
    assert len(find_ends(model)) == len(digests)  # tied ends still share their table


def test_a_checkpoint_with_compressed_ends_is_the_model_of_another_run(recipe, tmp_path, pico_ids):
    first = compress.run(recipe(step(), save={"format": "native"}, eval=None), tmp_path / "a", progress=False)
    digest = ends_of(compress.load(first.folder)[0])["lm_head"].sha256()
    more = recipe(compress.GPTQ(group_size=32), model=str(first.folder), save={"format": "native"}, eval=None)
    more = more.model_copy(update={"calibration": recipe(step()).calibration})
    second = compress.run(more, tmp_path / "b", progress=False)
    assert ends_of(compress.load(second.folder)[0])["lm_head"].sha256() == digest
    with pytest.raises(TargetError, match="lm_head is already quantized in the model that the passes start with"):
        compress.plan(recipe(step(), model=str(first.folder), save={"format": "native"}))
    dense = compress.run(
        more.model_copy(update={"save": compress.Save(format="dense")}), tmp_path / "c", progress=False
    )
    tokens = pico_ids[:2]
    one, other = (compress.load(folder)[0](input_ids=tokens).logits for folder in (second.folder, dense.folder))
    assert float((one - other).abs().max()) <= LOGITS


def test_an_untied_head_is_calibrated_on_what_the_compressed_blocks_give(tiny, ids):
    model, tokens = tiny("llama"), ids(8, 32)
    dense, steps = copy.deepcopy(model), [compress.GPTQ(group_size=16, weights="int3")]
    nearest, head = copy.deepcopy(model), {"weights": "int3", "group_size": 16, "targets": "lm_head"}
    compress.apply(model, [*steps, compress.GPTQ(**head)], tokens)
    compress.apply(nearest, [*steps, compress.RTN(**head)], tokens)
    compress.apply(dense, steps, tokens)
    assert model.get_output_embeddings().quantized and not isinstance(model.get_input_embeddings(), CompressedEmbedding)
    seen = []
    dense.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    dense(input_ids=tokens)
    gram = seen[0].reshape(-1, seen[0].shape[-1]).double()
    lost = [((m.lm_head.weight - dense.lm_head.weight).double() @ gram.T).square().sum() for m in (model, nearest)]
    assert lost[0] < 0.9 * lost[1]


def test_a_head_with_rounded_inputs_and_options_of_its_own(tiny, ids):
    model, tokens = tiny("llama"), ids()
    overrides = {"embed_tokens": {"weights": "int4", "group_size": 16}, "lm_head": {"activations": "int8"}}
    compress.apply(model, compress.RTN(targets=EVERYWHERE, overrides=overrides, **INT8), tokens)
    found = ends_of(model)
    assert found["model.embed_tokens"].scheme.text == "int4, group 16" and found["lm_head"].rounding is not None
    assert model.model.layers[0].mlp.up_proj.scheme.text == "int8, group channel"


def test_transformers_reads_a_quantized_head_but_no_quantized_embedding(tiny_folder, recipe, pico, tmp_path):
    blocks, head = compress.RTN(group_size=16), compress.GPTQ(group_size=16, targets="lm_head")
    built = recipe(blocks, head, model=tiny_folder("llama"))
    result = compress.run(built, tmp_path / "out", progress=False)
    assert result.report["verified"]["transformers"] is not None  # its logits and its weights are equal
    assert ends_of(compress.load(result.folder)[0])["lm_head"].scheme.text == "int4, group 16"
    for model, targets, kind in ((tiny_folder("llama"), "embed_tokens", "an embedding in codes"), (pico, BOTH, "tied")):
        with pytest.raises(TargetError, match=f"transformers loads no format compressed-tensors with.*{kind}.*native"):
            compress.plan(recipe(step(targets=targets), model=model))


ONE = r"the output head lm_head and the embedding model.embed_tokens are tied.*add {} to targets"


@pytest.mark.parametrize(
    ("family", "made", "message"),
    [
        ("pico", step(targets=["*", "lm_head"]), ONE.format("model.embed_tokens")),
        ("pico", step(targets=["Embedding"]), ONE.format("lm_head")),
        ("pico", compress.GPTQ(targets=EVERYWHERE), "calibrates on the inputs.*tied to lm_head.*are token ids; remove"),
        ("llama", compress.GPTQ(targets="embed_tokens"), "calibrates on the inputs of a layer.*are token ids"),
        ("llama", step(targets="embed_tokens", activations="int8"), "rounds the inputs.*embed_tokens are token ids"),
        ("llama", compress.Wanda(targets="lm_head"), "only passes that quantize one layer at a time take"),
        ("llama", compress.SparseGPT(targets="lm_head", weights="int4"), "it prunes the linears inside the blocks"),
        ("llama", compress.Distill(targets=["lm_head"]), "only passes that quantize one layer at a time take"),
        (
            "llama",
            compress.GPTQ(targets="lm_head", error="asymmetric"),
            r"it compares a layer with the uncompressed one \(error: asymmetric\)",
        ),
        ("llama", step(targets=["lm_head"], ignore=["lm_head"]), "select none of the"),
    ],
)
def test_what_cannot_be_done_to_the_ends_is_said_before_any_work(family, made, message, in_memory, tiny, pico_model):
    opened = in_memory(pico_model if family == "pico" else tiny(family))
    with pytest.raises(TargetError, match=message):
        resolve_passes([made], opened, FORMATS["native"])


def test_two_passes_for_the_blocks_and_for_the_ends_may_stand_in_one_recipe():
    built = compress.Recipe(model="m", passes=[compress.GPTQ(), step()])
    assert [found.key() for found in built.passes] == ["gptq", "rtn"]


def test_a_damaged_table_is_one_line(tiny, tmp_path):
    model = tiny("llama")
    compress.apply(model, step(targets="embed_tokens"))
    folder = compress.save(model, tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["layers"]["model.embed_tokens"]["shape"][0] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model.embed_tokens is \["):
        compress.load(folder)
