"""What was written wrongly, or was damaged afterwards, is found before a run is called successful."""

import re
import shutil

import numpy as np
import pytest
import torch
from model_families import VOCAB
from safetensors.torch import load_file, save_file
from schemes import coded, rounding
from tolerances import CROSSED_LOGITS, LOGITS
from transformers import LlamaForCausalLM, RwkvConfig, RwkvForCausalLM

import compress
from compress.checkpoint.containers.digests import WORK
from compress.checkpoint.containers.files import file_sha256
from compress.checkpoint.formats import FORMATS
from compress.errors import CompressError, VerificationError
from compress.kernels.dispatch import plain_torch
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.passes.contract.context import Run
from compress.passes.contract.journal import Journal
from compress.pipeline import verify as verification
from compress.pipeline.checkpoint import open_folder
from compress.pipeline.readers import unreadable
from compress.pipeline.verify import verify
from compress.recipe.schema import Save

LAYER = "model.layers.1.mlp.up_proj"
SHARD = "model-00003-of-00004.safetensors"


@pytest.fixture(scope="module")
def asked(recipe):
    return recipe(compress.RTN(weights="int4", group_size=32))


@pytest.fixture(scope="module")
def finished(asked, tmp_path_factory):
    return compress.run(asked, tmp_path_factory.mktemp("verify") / "out").folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it that may be damaged."""
    return shutil.copytree(finished, tmp_path / "out")


@pytest.fixture
def check(asked, manifest_of):
    """check(folder, recipe=..., digests=..., reference=...) -> Verified, as the end of a run."""

    def checked(folder, recipe=asked, digests=None, reference=None):
        if digests is None:
            digests = {n: d for entry in manifest_of(folder)["shards"].values() for n, d in entry["digests"].items()}
        reference = load_file(folder / WORK / "probe.safetensors") if reference is None else reference
        return verify(recipe, torch.float32, folder, digests, reference, Run())[0]

    return checked


def change(folder, key, how):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SHARD).items()}
    tensors[key] = how(tensors[key])
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})


def test_what_is_right_is_right(check, finished):
    verified = check(finished)
    assert verified.layers == 21 and verified.own <= LOGITS
    assert verified.transformers <= LOGITS and verified.skipped is None


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale"])
def test_one_wrong_bit_in_codes_or_scales_names_the_layer(part, check, folder):
    def flip(tensor):
        flat = tensor.view(torch.int32).reshape(-1)
        flat[7] ^= 1
        return tensor

    change(folder, f"{LAYER}.{part}", flip)
    with pytest.raises(
        VerificationError, match=r"the codes of model\.layers\.1\.mlp\.up_proj differ from the computed ones"
    ):
        check(folder)


def test_a_layer_that_is_dense_where_codes_were_computed(check, folder):
    digests = {"lm_head": "00"}
    with pytest.raises(VerificationError, match="the codes of lm_head differ from the computed ones"):
        check(folder, digests=digests)


def test_a_wrong_dense_tensor_is_seen_in_the_logits(check, folder):
    change(folder, "model.layers.1.input_layernorm.weight", lambda tensor: tensor * 1.5)
    with pytest.raises(VerificationError, match=r"reloaded by compress\.load, the model's outputs differ by up to"):
        check(folder)


def test_logits_that_are_not_a_number_are_not_equal(check, finished):
    reference = load_file(finished / WORK / "probe.safetensors")
    reference["logits"][0, 0, 0] = float("nan")
    with pytest.raises(VerificationError, match="differ by up to nan"):
        check(finished, reference=reference)


@pytest.fixture(scope="module")
def quantized_inputs(recipe, tmp_path_factory):
    """The recipe and the checkpoint of a model whose activations are quantized per token."""
    asked = recipe(compress.RTN(weights="int8", group_size="channel", activations="int8"))
    return asked, compress.run(asked, tmp_path_factory.mktemp("w8a8") / "out", progress=False).folder


def logits_with_crossed_code(folder, batch):
    """The logits of a checkpoint whose first layer reads one input a step further, as after another last bit."""

    def cross(module, args):
        inputs = args[0].clone()
        token = inputs[0, 3]
        token[token.abs().argmin()] += token.abs().max() / 127
        return (inputs,)

    model = compress.load(folder, dtype="float32")[0]
    with plain_torch(), model.get_submodule("model.layers.0.mlp.up_proj").register_forward_pre_hook(cross):
        return logits_of(model, batch)


def test_a_crossed_code_of_an_activation_is_no_wrong_checkpoint(check, quantized_inputs):
    asked, folder = quantized_inputs
    reference = load_file(folder / WORK / "probe.safetensors")
    crossed = reference | {"logits": logits_with_crossed_code(folder, Batch.of_tensors(reference))}
    difference = (crossed["logits"] - reference["logits"]).abs().max()
    assert difference > 1e-3 * reference["logits"].abs().max()  # far more than the last bits of equal arithmetic
    verified = check(folder, asked, reference=crossed)
    assert verified.own == pytest.approx(float(difference), rel=0.1)
    assert check(folder, asked).own <= CROSSED_LOGITS


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        (f"{LAYER}.weight", lambda codes: codes + (torch.arange(codes.numel()).view(codes.shape) == 7), "the codes of"),
        ("model.layers.1.input_layernorm.weight", lambda weight: weight * 1.5, "outputs differ by up to"),
    ],
)
def test_a_wrong_checkpoint_with_quantized_activations_is_seen(key, wrong, message, check, quantized_inputs, tmp_path):
    asked, folder = quantized_inputs
    damaged = shutil.copytree(folder, tmp_path / "out")
    change(damaged, key, wrong)
    with pytest.raises(VerificationError, match=message):
        check(damaged, asked)


def test_a_shard_that_was_cut_off(check, folder):
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[: len(data) // 2])
    with pytest.raises(CompressError, match=rf"{SHARD} is truncated"):
        check(folder)


@pytest.mark.parametrize("damage", ["gone", "changed", "probe", "config", "index"])
def test_what_is_damaged_of_a_finished_run_is_computed_again(asked, folder, damage):
    files = {"probe": f"{WORK}/probe.safetensors", "config": "config.json", "index": "model.safetensors.index.json"}
    wanted = {path.name: file_sha256(path) for path in folder.glob("*.safetensors")}
    path = folder / files.get(damage, SHARD)
    if damage == "changed":
        change(folder, f"{LAYER}.weight_scale", lambda tensor: tensor * 2)
    else:
        path.unlink()
    heard = []
    result = compress.run(asked, folder, journal=Journal(listeners=[heard.append]))
    assert {path.name: file_sha256(path) for path in folder.glob("*.safetensors")} == wanted
    assert any(e.where == "resume" and path.name in e.message for e in result.journal.entries)
    worked = [entry.message for entry in heard if entry.kind == "block"]
    assert worked == (["model.layers.1"] if path.name == SHARD else [])


def test_another_reading_of_the_weights_by_transformers(check, folder, monkeypatch):
    monkeypatch.setattr("compress.pipeline.verify.CompressedLinear.weight_as", lambda self, dtype: torch.zeros(1))
    with pytest.raises(
        VerificationError, match="transformers reads another weight for model.layers.0.self_attn.q_proj"
    ):
        check(folder)


@pytest.fixture
def loaded_by_transformers(monkeypatch):
    """loaded_by_transformers(change): what transformers loads is changed before it is compared."""

    def changing(change):
        load = LlamaForCausalLM.from_pretrained

        def changed(*arguments, **options):
            model = load(*arguments, **options)
            change(model)
            return model

        monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", changed)

    return changing


def test_other_logits_by_transformers(check, folder, loaded_by_transformers):
    loaded_by_transformers(lambda model: model.model.norm.weight.data.mul_(2))
    with pytest.raises(VerificationError, match="reloaded by transformers, the model's outputs differ"):
        check(folder)


@pytest.fixture
def mixture(recipe, tiny, tmp_path, monkeypatch):
    """A recipe for a mixture in bfloat16, whose outputs differ in this dtype, because transformers adds those of experts
    in another order: by up to a sixth of the largest logit, where a router is undecided; here on every processor."""
    tolerance = verification.tolerance_of
    narrow = lambda dtype, others: -1.0 if dtype is torch.bfloat16 else tolerance(dtype, others)  # noqa: E731
    monkeypatch.setattr(verification, "tolerance_of", narrow)
    tiny("mixtral", seed=4).to(torch.bfloat16).save_pretrained(tmp_path / "mixture")
    np.save(tmp_path / "ids.npy", torch.randint(VOCAB, (8, 64), generator=torch.Generator().manual_seed(4)).numpy())
    text = compress.Calibration(source=str(tmp_path / "ids.npy"), sequences=8, length=64)
    step = compress.RTN(weights="int8", group_size="channel")
    return recipe(step, model=str(tmp_path / "mixture"), dtype="bfloat16", calibration=text, eval=None)


@pytest.fixture
def reloaded(monkeypatch):
    """reloaded(change=None) -> the dtypes in which transformers loads the checkpoint; `change` is called with the model."""

    def watching(change=lambda model: None):
        dtypes, load = [], verification.transformers_model

        def loading(model_class, folder, dtype, *rest):
            dtypes.append(dtype)
            model = load(model_class, folder, dtype, *rest)
            change(model)
            return model

        monkeypatch.setattr(verification, "transformers_model", loading)
        return dtypes

    return watching


def test_routers_that_are_undecided_in_16_bits_are_no_wrong_checkpoint(mixture, tmp_path, reloaded):
    dtypes = reloaded()
    verified = compress.run(mixture, tmp_path / "out", progress=False).report["verified"]
    assert verified["transformers"] < 0.05 and verified["skipped"] is None
    assert dtypes == [torch.bfloat16, torch.float32]


def test_another_model_of_transformers_is_an_error_in_16_bits_too(mixture, tmp_path, reloaded):
    reloaded(lambda model: model.model.norm.weight.data.mul_(2))
    with pytest.raises(VerificationError, match="reloaded by transformers, the model's outputs differ"):
        compress.run(mixture, tmp_path / "out", progress=False)


def test_without_memory_for_float32_a_warning_says_what_was_not_compared(mixture, tmp_path, reloaded, monkeypatch):
    dtypes, free = reloaded(), verification.available_bytes
    monkeypatch.setattr(verification, "available_bytes", lambda device: 0 if dtypes else free(device))
    result = compress.run(mixture, tmp_path / "out", progress=False)
    (said,) = (entry.message for entry in result.journal.entries if entry.kind == "warning")
    assert said.startswith("outputs in bfloat16 differ by more than equal sums do; not compared in float32: the dense")
    assert result.report["verified"]["skipped"].endswith("MB are available")


def test_transformers_holds_one_layer_multiplied_out_at_a_time(check, folder, loaded_by_transformers):
    held = []

    def watch(model):
        packed = [m for m in model.modules() if getattr(m, "quantization_status", None) == "compressed"]
        for layer in packed:
            layer.register_forward_hook(lambda *_: held.append(sum("weight" in m._parameters for m in packed)))

    loaded_by_transformers(watch)
    check(folder)
    assert held == [1] * 21


def test_a_checkpoint_that_transformers_cannot_load(check, folder, monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such thing")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", broken)
    with pytest.raises(VerificationError, match="transformers cannot load the checkpoint: no such thing"):
        check(folder)


@pytest.mark.parametrize(
    ("options", "step", "reason"),
    [
        ({"verify": "own"}, {}, "the recipe says verify: own"),
        ({"format": "native"}, {}, r"format native is read by compress\.load only"),
    ],
)
def test_where_transformers_is_not_asked_the_report_says_why(options, step, reason, asked, tmp_path):
    result = compress.run(asked.model_copy(update={"save": Save(**options)}), tmp_path / "out")
    assert result.report["verified"]["transformers"] is None
    assert re.search(reason, result.report["verified"]["skipped"])
    assert any("not reloaded with transformers" in entry.message for entry in result.journal.entries)


UNREADABLE = {
    "transposed": ("gpt2", compress.RTN(group_size=16), r"layers are transposed \(Conv1D\)"),
    "zero points": (None, compress.HQQ(), r"\(int4 in groups of 32, int4 in groups of 64\); use a group_size that div"),
    "exchanged experts": (
        "llama4",
        compress.RTN(group_size=16),
        r"builds model\.layers\.0\.feed_forward\.experts of a",
    ),
    "dense experts": ("qwen3-moe", compress.RTN(targets="*.self_attn.*", group_size=16), "does not read dense experts"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_transformers_cannot_read_is_noted_before_and_after_the_run(case, recipe, pico, tiny_folder, tmp_path):
    family, step, reason = UNREADABLE[case]
    asked = recipe(step, model=tiny_folder(family) if family else pico)
    assert any(re.search(f"not verified with transformers: .*{reason}", note) for note in compress.plan(asked).notes)
    result = compress.run(asked, tmp_path / "out")
    verified = result.report["verified"]
    assert verified["own"] <= LOGITS and verified["transformers"] is None and re.search(reason, verified["skipped"])
    assert any(re.search(f"not reloaded with .*{reason}", entry.message) for entry in result.journal.entries)
    assert "AutoModel" not in (tmp_path / "out" / "README.md").read_text()


def test_packed_layers_whose_model_class_reads_their_weight():
    config = RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64, rescale_every=0)
    model, name = RwkvForCausalLM(config), "rwkv.blocks.0.attention.key"
    as_words = coded("int4", shape=(32, 32))
    as_bytes = coded("int8", "channel", True, rounding(), shape=(32, 32))
    for scheme, reason in (as_words, "initializes this model's linears by their weight"), (as_bytes, None):
        found = unreadable(FORMATS["compressed-tensors"], model, {name: scheme}, torch.float32, False)
        assert found is None if reason is None else reason in found


def test_zero_points_with_scales_in_16_bits_load_into_a_float32_model(recipe, tmp_path):
    """transformers dequantizes packed zero points while it loads, in the dtype of the stored scales."""
    step = compress.RTN(weights="int4", group_size=32, symmetric=False)
    result = compress.run(recipe(step, dtype="float32", save={"dtype": "bfloat16"}), tmp_path / "out", progress=False)
    assert result.report["verified"]["transformers"] > 0 and result.report["verified"]["own"] <= LOGITS
    assert any("dequantizes these weights in bfloat16" in entry.message for entry in result.journal.entries)


def test_without_the_package_that_reads_it_the_plan_says_so(recipe, monkeypatch):
    monkeypatch.setattr("compress.checkpoint.formats.compressed_tensors.importlib.util.find_spec", lambda name: None)
    notes = compress.plan(recipe(compress.RTN(group_size=32))).notes
    assert any("not verified with transformers: the package compressed-tensors is not installed" in n for n in notes)


def test_what_only_the_finished_checkpoint_shows_is_stated(check, finished, monkeypatch):
    monkeypatch.setattr(
        "compress.checkpoint.formats.compressed_tensors.CompressedTensors.unreadable", lambda *_: "a reason"
    )
    verified = check(finished)
    assert verified.skipped == "a reason" and verified.transformers is None and verified.own <= LOGITS


def test_a_damaged_shard_of_an_unfinished_run_is_made_again(asked, folder, manifest_of):
    manifest = open_folder(folder, manifest_of(folder)["fingerprint"], overwrite=False)
    manifest.complete = False
    manifest.write()
    good = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    compress.run(asked, folder)
    assert (folder / SHARD).read_bytes() == good
