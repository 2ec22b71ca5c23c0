"""compress.save and what transformers and torch do with a compressed model: the same function, or an error."""

import copy
import io
import json
import pickle

import pytest
import torch
from tolerances import LOGITS, layers_near, near_rounded, same_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress import (
    GOBO,
    GPTQ,
    HQQ,
    OWQ,
    RTN,
    ChannelPermutation,
    Finetune,
    KVCache,
    LoRC,
    SmoothQuant,
    Wanda,
)
from compress.checkpoint.opening import open_model
from compress.errors import ModelError, OutputError, SaveError, TargetError, UserError, VerificationError
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import CompressedLinear, linears
from compress.models.caches.attentions import cache_policies

MLP = "*.mlp.*"
CHAINS = {
    "pruned": lambda: [Wanda(pattern="2:4")],
    "rounded": lambda: [GPTQ(group_size=32, symmetric=False)],
    "pruned, rounded": lambda: [Wanda(pattern="2:4"), SmoothQuant(), RTN(group_size=32)],
    "nvfp4": lambda: [RTN(weights="nvfp4")],
    "nf4, float zeros": lambda: [RTN(weights="nf4", targets=MLP), HQQ(zero_point="float", ignore=[MLP])],
    "rounded inputs": lambda: [RTN(weights="int8", group_size="channel", activations="int8")],
    "low rank": lambda: [RTN(weights="int3"), LoRC(rank=4)],
    "outliers": lambda: [OWQ(budget=0.5)],
    "dictionaries": lambda: [GOBO(outliers=0.01)],
    "permuted": lambda: [ChannelPermutation(escapes=0, unlinked="keep"), Wanda(pattern="2:4")],
    "cached": lambda: [KVCache(scale="static"), RTN(targets=MLP)],
}


@pytest.fixture(scope="module")
def applied(pico, pico_ids):
    """applied(name) -> a fresh copy of pico after some passes."""
    made = {}

    def build(name):
        if name not in made:
            made[name] = compress.apply(AutoModelForCausalLM.from_pretrained(pico), CHAINS[name](), pico_ids)
        return copy.deepcopy(made[name])

    return build


@pytest.fixture
def logits(pico_ids):
    """logits(model) -> on a sequence of the embedded text."""

    @torch.no_grad()
    def compute(model):
        with plain_torch():  # kernels add in another order
            return model(input_ids=pico_ids[:1]).logits.float()

    return compute


def layers(model):
    return {n: m for n, m in linears(model).items() if isinstance(m, CompressedLinear)}


# compress.save


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CHAINS)
def test_native_holds_everything(name, applied, logits, tmp_path):
    model = applied(name)
    before = {n: layer.sha256() for n, layer in layers(model).items()}
    folder = compress.save(model, tmp_path / "out", sparse="always")
    loaded, tokenizer = compress.load(folder)
    assert tokenizer is None
    assert float((logits(loaded) - logits(model)).abs().max()) <= LOGITS
    assert {n: layer.sha256() for n, layer in layers(model).items()} == before, "the model has changed"
    assert cache_policies(loaded) == cache_policies(model)
    for n, layer in layers(model).items():
        found = CompressedLinear.of(loaded.get_submodule(n))
        assert torch.equal(found.weight, layer.weight)
        assert layer.mask is None or torch.equal(found.mask, layer.mask)


@pytest.mark.parametrize("name", ["rounded", "rounded inputs", "nvfp4"])
def test_compressed_tensors_is_read_by_transformers(name, applied, logits, pico, pico_ids, tmp_path):
    pytest.importorskip("compressed_tensors")
    model, tokenizer = applied(name), AutoTokenizer.from_pretrained(pico)
    folder = compress.save(model, tmp_path / "out", format="compressed-tensors", tokenizer=tokenizer)
    ours, found = compress.load(folder)
    assert found.get_vocab() == tokenizer.get_vocab()
    assert float((logits(ours) - logits(model)).abs().max()) <= LOGITS
    if name != "nvfp4":  # transformers dequantizes it in bfloat16
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        with plain_torch():  # rounded inputs may get other codes for a sum in another order
            wanted = logits(model)
        if name == "rounded inputs":
            assert near_rounded(logits(theirs), wanted) and layers_near(theirs, ours, pico_ids[:1])
        else:
            assert float((logits(theirs) - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())


@pytest.mark.parametrize("name", ["pruned", "pruned, rounded", "low rank", "permuted", "outliers"])
def test_dense_is_read_by_everyone(name, applied, logits, tmp_path):
    model = applied(name)
    folder = compress.save(model, tmp_path / "out", format="dense")
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert float((logits(stock) - logits(model)).abs().max()) <= 10 * LOGITS
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("family", "format_"), [("gpt2", "native"), ("qwen3-moe", "dense"), ("mixtral", "native")])
def test_other_families(family, format_, tiny, ids, tmp_path):
    model = compress.apply(tiny(family), [Wanda(sparsity=0.5), RTN(group_size=16)], ids())
    loaded, _ = compress.load(compress.save(model, tmp_path / "out", format=format_))
    with torch.no_grad():
        difference = loaded(input_ids=ids()).logits - model(input_ids=ids()).logits
    assert float(difference.abs().max()) <= 10 * LOGITS


def test_masks_that_no_tensor_stores_are_listed(applied, pico_ids, pico, tmp_path):
    model = compress.apply(AutoModelForCausalLM.from_pretrained(pico), [Wanda(sparsity=0.1)], pico_ids)
    folder = compress.save(model, tmp_path / "out", format="dense")
    opened = open_model(str(folder))
    assert "pruned by an earlier run" in opened.notes[0]
    opened.weights.bring(opened.blocks[0])
    for name, layer in linears(opened.blocks[0].module).items():
        assert torch.equal(layer.mask, model.get_submodule(f"model.layers.0.{name}").mask)


def test_the_dtype_of_what_is_stored(applied, tmp_path):
    folder = compress.save(applied("rounded"), tmp_path / "out", dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    loaded, _ = compress.load(folder)
    assert next(iter(layers(loaded).values())).codes.scale.dtype == torch.bfloat16


def test_what_cannot_be_saved(applied, tmp_path, monkeypatch):
    model = applied("outliers")
    for options, error, message in [
        ({"format": "nativ"}, UserError, "format 'nativ' is not known; did you mean 'native'"),
        ({"dtype": "float8"}, UserError, "dtype 'float8' is not known"),
        ({"format": "dense", "sparse": "always"}, UserError, "format dense stores the zeros; use native"),
        ({"format": "compressed-tensors"}, TargetError, r"model: model\.layers\.0\..* holds only codes"),
    ]:
        with pytest.raises(error, match=message):
            compress.save(model, tmp_path / "out", **options)
        assert list(tmp_path.iterdir()) == [], "nothing is left of a checkpoint that failed"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="exists already; name a new or empty folder"):
        compress.save(model, tmp_path / "full")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        compress.save(model, tmp_path / "file" / "out")
    monkeypatch.setattr("compress.pipeline.export.load", lambda *_: (applied("pruned"), None))
    with pytest.raises(VerificationError, match=r"model\.layers\.0\..* differs after reloading"):
        compress.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_that_shares_its_tensor_with_the_embedding_is_saved(applied, logits, tmp_path):
    model = applied("pruned")
    wanted = logits(model)
    model.lm_head = CompressedLinear.of(model.lm_head)
    loaded, _ = compress.load(compress.save(model, tmp_path / "out"))
    assert same_logits(logits(loaded), wanted)


def test_layers_without_values_cannot_be_saved(applied, tmp_path):
    with pytest.raises(SaveError, match="is on the meta device, without values"):
        compress.save(applied("pruned").to_empty(device="meta"), tmp_path / "out")


def test_an_empty_folder_may_exist(applied, tmp_path):
    (tmp_path / "out").mkdir()
    assert compress.save(applied("pruned"), tmp_path / "out") == tmp_path / "out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


# transformers


def test_save_pretrained_of_a_pruned_model_is_an_ordinary_checkpoint(applied, logits, tmp_path, pico_ids):
    model = applied("pruned")
    for state in (None, model.state_dict()):  # transformers' trainer passes one
        model.save_pretrained(tmp_path / "out", state_dict=state)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert same_logits(logits(stock), logits(model))
    compress.apply(model, [Finetune(steps=2, batch=2)], pico_ids)
    model.save_pretrained(tmp_path / "trained")
    assert same_logits(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "trained")), logits(model))


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen3-moe"])
def test_save_pretrained_of_other_families(family, tiny, ids, tmp_path):
    model = compress.apply(tiny(family), [Wanda(sparsity=0.5)], ids())
    model.save_pretrained(tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        difference = stock(input_ids=ids()).logits - model(input_ids=ids()).logits
    assert float(difference.abs().max()) <= 10 * LOGITS


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [name for name in CHAINS if name != "pruned"])
def test_save_pretrained_of_other_layers_names_compress_save(name, applied, tmp_path):
    with pytest.raises(SaveError, match=r"transformers cannot store; use compress\.save\(model, folder\)"):
        applied(name).save_pretrained(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_push_to_hub_uploads_nothing_wrong(applied, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: type("Repo", (), {"repo_id": "a/b"})())
    with pytest.raises(SaveError, match=r"compress\.save"):
        applied("rounded").push_to_hub("a/b")


def test_a_loaded_checkpoint_is_saved_with_its_weights(applied, logits, tmp_path):
    model = applied("rounded")
    loaded, _ = compress.load(compress.save(model, tmp_path / "first"))
    with pytest.raises(SaveError, match=r"compress\.save"):
        loaded.save_pretrained(tmp_path / "wrong")
    again, _ = compress.load(compress.save(loaded, tmp_path / "second"))
    assert same_logits(logits(again), logits(loaded))
    pruned, _ = compress.load(compress.save(applied("pruned"), tmp_path / "third", format="dense"))
    pruned.save_pretrained(tmp_path / "fourth")
    assert same_logits(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "fourth")), logits(pruned))


# torch


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CHAINS)
def test_a_state_dict_loads_into_an_equally_compressed_model(name, applied, pico, pico_ids, logits):
    model = applied(name)
    other = compress.apply(AutoModelForCausalLM.from_pretrained(pico), CHAINS[name](), pico_ids.flip(0)[:2])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    logits(other)  # kernels prepare weights
    missing = other.load_state_dict(model.state_dict())
    assert not missing.missing_keys and not missing.unexpected_keys
    assert near_rounded(logits(other), logits(model))
    assert {n: m.sha256() for n, m in layers(other).items()} == {n: m.sha256() for n, m in layers(model).items()}
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))


def test_masks_are_counted_again_after_a_state_dict(pico, pico_ids):
    first, second = (
        compress.apply(AutoModelForCausalLM.from_pretrained(pico), [Wanda(sparsity=share)], pico_ids)
        for share in (0.5, 0.25)
    )
    second.load_state_dict(first.state_dict())
    for name, layer in layers(second).items():
        assert layer.sparsity == first.get_submodule(name).sparsity


def test_a_state_dict_of_another_grid_is_refused(pico_model, pico):
    compress.apply(pico_model, [RTN(weights="int4", group_size=32)])
    other = compress.apply(AutoModelForCausalLM.from_pretrained(pico), [RTN(weights="fp4_e2m1", group_size=32)])
    with pytest.raises(RuntimeError, match=r"q_proj is fp4_e2m1, group 32, but the state dict holds int4, group 32"):
        other.load_state_dict(pico_model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(AutoModelForCausalLM.from_pretrained(pico).state_dict())


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CHAINS)
def test_copies_and_pickles_compute_the_same(name, applied, logits):
    model = applied(name)
    wanted = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert near_rounded(logits(other), wanted)
        assert {n: m.sha256() for n, m in layers(other).items()} == {n: m.sha256() for n, m in layers(model).items()}
        with torch.no_grad():
            for tensor in (*other.parameters(), *other.buffers()):
                tensor.zero_()
    assert near_rounded(logits(model), wanted), "a copy shares tensors"


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_changes_no_code_and_no_scale(name, dtype, applied, logits):
    model, exact = applied(name), applied(name)
    wanted = logits(model)
    model = model.half() if dtype == torch.float16 else model.to(dtype)
    for n, layer in layers(model).items():
        before = exact.get_submodule(n)
        if layer.quantized:
            assert layer.sha256() == before.sha256(), n
            assert torch.equal(layer.weight, before.weight)
        else:
            assert torch.equal(layer.weight, before.weight.to(dtype))
    found = logits(model)
    assert found.isfinite().all()
    assert float((found - wanted).norm() / wanted.norm()) < 0.05
    back = model.float()
    for n, layer in layers(back).items():
        if layer.quantized:
            assert layer.sha256() == exact.get_submodule(n).sha256()
    if all(layer.quantized for layer in layers(back).values()):
        assert float((logits(back) - wanted).norm() / wanted.norm()) < 0.05


def test_devices_and_dtypes_change_together(applied):
    model = applied("rounded").to("meta", torch.bfloat16)
    layer = next(iter(layers(model).values()))
    assert layer.codes.scale.is_meta and layer.codes.scale.dtype == torch.float32
    assert model.lm_head.weight.is_meta and model.lm_head.weight.dtype == torch.bfloat16


def test_small_scales_survive_half(pico_model, logits):
    """A scale below the smallest float16 would be zero, and all weights of its group with it."""
    layer = pico_model.model.layers[0].mlp.up_proj
    layer.weight.data *= 1e-6
    compress.apply(pico_model, [RTN(group_size=32)])
    pico_model.half()
    scale = pico_model.model.layers[0].mlp.up_proj.codes.scale
    assert scale.dtype == torch.float32 and bool((scale > 0).all())


def test_a_checkpoint_of_an_unknown_method(tmp_path, applied):
    folder = compress.save(applied("rounded"), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "magic"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantized by 'magic', which compress does not read; start from its dense"):
        compress.load(folder)
