"""Opening a model: what is found, what is mapped, and one clear error for everything that can be wrong with a folder."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import near
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

import compress
from compress.checkpoint.opening import open_model
from compress.errors import ModelError
from compress.layers.linear import linears
from compress.models.structure.blocks import Block


@pytest.fixture
def folder(pico, tmp_path):
    """A copy of the pico model that may be damaged."""
    return Path(shutil.copytree(pico, tmp_path / "model"))


def edit(path: Path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def retensor(folder: Path, change):
    """Rewrite model.safetensors with what change(dict of tensors) leaves."""
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def runs_like(opened, folder, ids, dtype=torch.float32):
    """Whether the streamed model gives the logits that transformers gives, bit for bit."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad(), opened.streaming() as model:
        return near(model(input_ids=ids).logits, theirs(input_ids=ids).logits)


# ---- what is opened ----


def test_a_local_folder(pico, ids):
    opened = open_model(pico)
    assert [block.name for block in opened.blocks] == [f"model.layers.{i}" for i in range(3)]
    assert opened.source == pico and opened.dtype == torch.float32 and opened.notes == []
    assert opened.tokenizer is not None and opened.config.hidden_size == 128
    assert opened.linear_names()[:2] == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    assert len(opened.linear_names()) == 21
    assert runs_like(opened, pico, ids())


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt", "gemma2"])
def test_every_family_opens_mapped_and_computes_the_same(family, tiny_folder, ids):
    opened = open_model(tiny_folder(family))
    assert opened.weights.checkpoint is not None and opened.tokenizer is None
    assert runs_like(opened, tiny_folder(family), ids())


def test_weights_are_cast_to_the_dtype_asked_for(pico, ids):
    opened = open_model(pico, dtype="bfloat16")
    assert opened.dtype == torch.bfloat16
    assert opened.model.get_input_embeddings().weight.dtype == torch.bfloat16
    opened.weights.bring(opened.blocks[0])
    assert {p.dtype for p in opened.blocks[0].module.parameters()} == {torch.bfloat16}
    assert runs_like(opened, pico, ids(), torch.bfloat16)


def test_the_checkpoints_dtype_is_the_default(tiny, tmp_path):
    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    opened = open_model(str(tmp_path))
    assert (opened.widened_from or opened.dtype) == torch.bfloat16  # processors without bfloat16 products widen it


def test_blocks_are_on_the_meta_device_but_while_they_are_needed(pico):
    opened = open_model(pico)
    first, second = opened.blocks[:2]

    def devices(block: Block):
        return {tensor.device.type for tensor in block.module.state_dict().values()}

    assert devices(first) == devices(second) == {"meta"}
    assert opened.model.get_input_embeddings().weight.device.type == "cpu"
    opened.weights.bring(first)
    assert devices(first) == {"cpu"} and devices(second) == {"meta"}
    stored = load_file(Path(pico) / "model.safetensors")
    assert all(torch.equal(t, stored[f"{first.name}.{n}"]) for n, t in first.module.state_dict().items())
    opened.weights.release(first)
    assert devices(first) == {"meta"}
    assert {name: layer.weight.shape for name, layer in linears(first.module).items()} == {
        name: layer.weight.shape for name, layer in linears(second.module).items()
    }


def test_streaming_brings_each_block_for_its_own_forward_pass_only(pico, ids):
    opened = open_model(pico)
    resident = []
    with opened.streaming() as model, torch.no_grad():
        handles = [
            block.module.mlp.register_forward_hook(
                lambda *_: resident.append([not b.module.mlp.up_proj.weight.is_meta for b in opened.blocks])
            )
            for block in opened.blocks
        ]
        model(input_ids=ids())
        for handle in handles:
            handle.remove()
    assert resident == [[True, False, False], [False, True, False], [False, False, True]]
    assert not any(block.module._forward_pre_hooks or block.module._forward_hooks for block in opened.blocks)


def test_tied_weights_stay_tied(pico):
    model = open_model(pico).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_threads_that_open_models_leave_classes_as_they_were(pico, tiny_folder):
    """accelerate and transformers replace functions of torch and of their classes while a model is built."""
    functions = lambda: (nn.Module.register_parameter, PreTrainedModel.tie_weights, torch.linspace)  # noqa: E731
    before, sources = functions(), [pico, tiny_folder("mixtral")] * 4
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(lambda source: compress.load(source)[0], sources))
    assert functions() == before and not nn.Linear(2, 2).weight.is_meta
    assert not any(parameter.is_meta for model in models for parameter in model.parameters())


def test_weights_that_are_a_link_to_nothing(folder):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors").symlink_to("model-2.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is a link to a file that is missing; fetch"):
        open_model(str(folder))


def test_tied_weights_that_are_stored_twice_are_equal_or_an_error(folder, ids):
    retensor(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert runs_like(open_model(str(folder)), folder, ids())
    retensor(folder, lambda tensors: tensors | {"lm_head.weight": -tensors["lm_head.weight"]})
    message = r"embed_tokens.weight and lm_head.weight are one weight by config.json.*tie_word_embeddings: false"
    for reader in (open_model, compress.load):
        with pytest.raises(ModelError, match=message):
            reader(str(folder))
    edit(folder / "config.json", tie_word_embeddings=False)
    assert runs_like(open_model(str(folder)), folder, ids())


def test_names_without_the_base_models_prefix_are_mapped(tiny_folder, tmp_path, ids):
    shutil.copytree(tiny_folder("gpt2"), tmp_path, dirs_exist_ok=True)
    retensor(tmp_path, lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()})
    assert "h.0.attn.c_attn.weight" in load_file(tmp_path / "model.safetensors")
    opened = open_model(str(tmp_path))
    assert opened.weights.checkpoint is not None and opened.notes == []
    assert runs_like(opened, tiny_folder("gpt2"), ids())


def test_a_checkpoint_that_transformers_must_convert_is_loaded_whole_with_a_note(tmp_path, ids):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    config = GptOssConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert any(name.endswith(".experts.down_proj") for name in load_file(tmp_path / "model.safetensors"))
    opened = open_model(str(tmp_path))  # the file holds all experts in one tensor, the opened model one by one
    assert opened.weights.checkpoint is None
    assert "model.layers.1.mlp.experts.1.down_proj" in opened.linear_names()
    assert [log for log in opened.notes if "transformers loaded the whole model" in log]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(opened.model(input_ids=ids()).logits, theirs(input_ids=ids()).logits)


def test_a_checkpoint_with_another_name_for_its_head_is_mapped_as_transformers_renames_it(tiny_folder, ids):
    folder = tiny_folder("gpt-neox")
    assert "embed_out.weight" in load_file(Path(folder) / "model.safetensors")
    opened = open_model(folder)
    assert opened.weights.checkpoint is not None and opened.notes == [] and runs_like(opened, folder, ids())


def test_the_checkpoints_generation_config_is_kept(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 5], "temperature": 0.3}')
    found = open_model(str(folder)).model.generation_config
    assert (found.eos_token_id, found.temperature) == ([0, 5], 0.3)


def test_model_safetensors_alone_is_read_where_other_files_lie_beside_it(folder, pico, ids):
    save_file({"model.norm.weight": torch.zeros(128)}, folder / "zzz.safetensors")
    assert runs_like(open_model(str(folder)), pico, ids())


# ---- the fingerprint ----


def test_the_fingerprint_is_stable_and_does_not_depend_on_the_place_or_dtype(folder, pico):
    assert open_model(str(folder)).fingerprint == open_model(pico).fingerprint
    assert open_model(pico, dtype="bfloat16").fingerprint == open_model(pico).fingerprint


def test_the_fingerprint_changes_with_one_weight_and_with_the_config(folder, pico):
    def nudge(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-3

    before = open_model(pico).fingerprint
    retensor(folder, nudge)
    after = open_model(str(folder)).fingerprint
    edit(folder / "config.json", rms_norm_eps=1e-5)
    assert len({before, after, open_model(str(folder)).fingerprint}) == 3


# ---- what can be wrong ----


def truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_shard(folder):
    names = list(load_file(folder / "model.safetensors"))
    weight_map = dict.fromkeys(names, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def poison(name):
    def change(tensors):
        tensors[name].view(-1)[7] = float("nan")

    return lambda folder: retensor(folder, change)


def cut(name):
    return lambda folder: retensor(folder, lambda tensors: tensors | {name: tensors[name][:100]})


def lose(name):
    return lambda folder: retensor(folder, lambda tensors: {n: t for n, t in tensors.items() if n != name})


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES = {
    "unknown dtype": (
        lambda f: edit(f / "config.json", dtype="fp16"),
        r"config\.json \(its dtype 'fp16' is not known; did you mean 'float16'\?\)",
    ),
    "unknown dtype of a part": (
        lambda f: edit(
            f / "config.json", other={"dtype": "int4"}, text_config={"model_type": "llama", "dtype": "fp16"}
        ),
        r"its dtype 'fp16' is not known",  # other entries are not checked
    ),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no readable config\.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), r"has no readable config\.json.*not a valid JSON"),
    "unknown type": (
        lambda f: edit(f / "config.json", model_type="zork"),
        r"has no readable config\.json.*model type `zork`",
    ),
    "impossible config": (
        lambda f: edit(f / "config.json", num_attention_heads=5),
        r"has no readable config\.json.*not a multiple of the number of attention heads",
    ),
    "no causal model": (
        lambda f: (f / "config.json").write_text('{"model_type": "vit"}'),
        r"knows no class for model type 'vit'; set trust_remote_code: true to run it",
    ),
    "no blocks": (
        lambda f: edit(f / "config.json", num_hidden_layers=0),
        "holds tensors that are not read: model.layers.0",
    ),
    "unknown quantization": (
        lambda f: edit(f / "config.json", quantization_config={"quant_method": "zork"}),
        r"is quantized by 'zork', which compress does not read; start from its dense model",
    ),
    "pickled": (
        pickled,
        r"holds no \.safetensors file; pickled weights are not supported; convert them once: from_pretrained",
    ),
    "truncated": (truncate, r"model\.safetensors is truncated or not a safetensors file"),
    "missing shard": (missing_shard, r"model-00002-of-00002\.safetensors is missing, but the index lists it"),
    "broken index": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "is not an index of weights"),
    "missing tensor": (lose(UP), rf"lacks 1 tensors, the first {UP}; fetch it again"),
    "wrong shape": (cut(UP), rf"{UP} is \[100, 128\] in .*, but \[288, 128\] by its config\.json"),
    "more layers": (
        lambda f: edit(f / "config.json", num_hidden_layers=4),
        r"lacks 9 tensors, the first model\.layers\.3\.",
    ),
    "NaN embedding": (poison("model.embed_tokens.weight"), r"model\.embed_tokens\.weight holds 1 NaN or infinite"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "the tokenizer in .* cannot be read"),
    "broken generation config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        r"generation_config\.json cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder(damage, folder):
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(ModelError, match=message):
        open_model(str(folder))


def test_nan_in_a_block_is_found_when_it_is_brought(folder, recipe, tmp_path):
    import compress

    poison("model.layers.2.mlp.up_proj.weight")(folder)
    opened = open_model(str(folder))
    opened.weights.bring(opened.blocks[1])
    message = r"model\.layers\.2\.mlp\.up_proj\.weight holds 1 NaN or infinite weights; the checkpoint is damaged"
    with pytest.raises(ModelError, match=message):
        opened.weights.bring(opened.blocks[2])
    with pytest.raises(ModelError, match=message):
        compress.run(recipe(compress.RTN()).model_copy(update={"model": str(folder)}), tmp_path / "out")


def test_nan_in_a_block_of_a_model_in_memory(pico_model, ids):
    import compress

    pico_model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(ModelError, match=rf"{UP} holds 1 NaN or infinite weights"):
        compress.apply(pico_model, [compress.RTN()])


@pytest.mark.parametrize("source", ["/no/such/place", "./no-such-place", "~/no-such-place", "a/b/c", "FILE"])
def test_what_is_no_folder(source, folder):
    source = str(folder / "config.json") if source == "FILE" else source
    with pytest.raises(ModelError, match=r"model: no folder .*; use a hub id, a local folder, or a \.gguf file"):
        open_model(source)


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    begin = time.monotonic()
    with pytest.raises(
        ModelError, match=r"model: someone/model is not a local folder.*hub \(ConnectionError: no route"
    ):
        open_model("someone/model")
    assert time.monotonic() - begin < 5


def test_a_hub_id_is_fetched_without_pickles(monkeypatch, pico):
    asked = {}

    def fetch(name, revision, allow_patterns, ignore_patterns):
        asked[name] = allow_patterns
        return pico

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert open_model("someone/model").source == "someone/model"
    assert "*.safetensors" in asked["someone/model"]
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in asked["someone/model"])
    open_model("someone/model", trust_remote_code=True)
    assert asked["someone/model"] == ["*.py"]  # last, and next to the other files
