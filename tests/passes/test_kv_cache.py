"""KV-cache quantization: found everywhere, in place while others calibrate and train, shipped, read back by others."""

import copy
import json
import shutil

import pytest
import torch
from followers import Unpruned, Unrounded
from safetensors.torch import load_file, save_file
from tolerances import LOGITS, near
from transformers import AutoModelForCausalLM

import compress
from compress import AWQ, GPTQ, LKD, QAT, RTN, ChannelPermutation, Distill, DropBlocks, KVCache, SmoothQuant, Wanda
from compress.errors import CalibrationError, ModelError, NumericError, RecipeError, TargetError, VerificationError
from compress.kernels.dispatch import plain_torch
from compress.models.caches.attentions import (
    attentions_with_cache,
    cache_policies,
    policy_of,
    policy_tensors,
    watching,
)
from compress.models.caches.base import AttentionCache
from compress.models.terms import CACHE_KEY
from compress.numerics.hadamard import hadamard
from compress.numerics.quant.grids import GRIDS
from compress.passes.cache.kv_cache import ALLOWED
from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError
from compress.report.render import markdown
from compress.results.result import RunResult

FP8 = {"keys": "fp8_e4m3", "values": "fp8_e4m3", "scale": "static"}
INT2 = {"keys": "int2", "values": "int2"}
ATTENTION = "model.layers.1.self_attn"
SHARD = "model-00003-of-00004.safetensors"


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def scales(model):
    return {name: policy_tensors(m) for name, m in attentions_with_cache(model).items() if policy_of(m) is not None}


def test_a_scale_per_token_needs_no_data_and_changes_no_tensor(pico_model, pico_ids):
    before, state = logits(pico_model, pico_ids), {n: t.clone() for n, t in pico_model.state_dict().items()}
    compress.apply(pico_model, [KVCache(keys="int4", values="int4")])
    assert pico_model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in pico_model.state_dict().items())
    assert not torch.allclose(logits(pico_model, pico_ids), before, atol=1e-2)


def test_zero_points_halve_the_error_of_what_is_all_positive():
    x = torch.rand(64, 16, generator=torch.Generator().manual_seed(0)) + 1
    errors = []
    for symmetric in (True, False):
        found, _ = KVCache(keys="int4", symmetric=symmetric).cache.update(AttentionCache(), {}, x, x)
        errors.append(float((found - x).norm()))
    assert errors[1] < 0.55 * errors[0]


def test_a_static_scale_covers_what_the_block_makes_of_the_text(pico_model, pico_ids):
    """Of the rounded model: what comes to a block went through the rounded ones before it."""
    compress.apply(pico_model, [KVCache(keys="int8", values="none", scale="static")], pico_ids)
    largest = {}
    with watching(attentions_with_cache(pico_model), lambda name, k, v: largest.update({name: k.abs().amax()})):
        logits(pico_model, pico_ids)
    found = scales(pico_model)
    assert len(found) == 3 and all("v_scale" not in tensors for tensors in found.values())
    for name, tensors in found.items():
        assert float(tensors["k_scale"]) == pytest.approx(float(largest[name]) / 127.5, rel=1e-5)


def test_a_static_scale_of_transformed_keys_covers_those(pico_model, pico_ids):
    """Of the first block, whose keys are not changed by rounding: heads of 32 channels, times Sylvester's matrix."""
    with watching({"": pico_model.model.layers[0].self_attn}, lambda _, k, v: seen.append((k, v))):
        seen = []
        logits(pico_model, pico_ids)
    keys, values = seen[0]
    compress.apply(pico_model, [KVCache(scale="static", hadamard="keys")], pico_ids)
    tensors = scales(pico_model)["model.layers.0.self_attn"]
    turned = keys @ hadamard(32).float() / 32**0.5
    assert float(tensors["k_scale"]) == pytest.approx(float(turned.abs().amax()) / 127.5, rel=1e-5)
    assert float(tensors["v_scale"]) == pytest.approx(float(values.abs().amax()) / 127.5, rel=1e-5)


def test_only_attentions_that_hold_a_target_are_rounded(pico_model):
    compress.apply(
        pico_model, [KVCache(targets="*.1.self_attn.o_proj"), KVCache(targets="*.2.self_attn.*", keys="int4")]
    )
    found = {name: scheme.keys.name for name, scheme in cache_policies(pico_model).items()}
    assert found == {ATTENTION: "int8", "model.layers.2.self_attn": "int4"}


# Through other passes


def trained(model, ids, steps):
    journal = Journal()
    compress.apply(model, steps, ids, journal=journal)
    return journal.entries[-1].figures


def test_weights_learn_to_bear_rounded_keys_and_values(pico_model, pico_ids):
    """The teacher is the model without rounding: what is lost at first is made up for."""
    step = QAT(weights="int8", group_size=32, ce_weight=0, steps=12, batch=2, learning_rate=1e-3, weight_rate=0.1)
    figures = trained(pico_model, pico_ids, [KVCache(**INT2), step])
    assert figures["first_loss"] > 0.1 and figures["last_loss"] < 0.8 * figures["first_loss"]
    assert len(cache_policies(pico_model)) == 3


def test_the_teacher_is_not_rounded(pico_model, pico_ids):
    """Without rounding a model has nothing to learn from itself."""
    step = Distill(train=["norms"], steps=1, batch=2)
    assert trained(pico_model, pico_ids, [KVCache(keys="fp8_e4m3", values="none"), step])["first_loss"] > 1e-5


def test_what_is_calibrated_behind_it_is_calibrated_on_rounded_values(pico_model, pico_ids, monkeypatch):
    seen = []
    solve = GPTQ.codes
    monkeypatch.setattr(GPTQ, "codes", lambda self, w, s, layer: seen.append(s.hessian) or solve(self, w, s, layer))
    only = GPTQ(targets="*.0.self_attn.o_proj", group_size=32)
    for steps in ([only], [KVCache(**INT2), only]):
        compress.apply(copy.deepcopy(pico_model), steps, pico_ids)
    assert not torch.allclose(seen[0], seen[1], rtol=1e-2)


@pytest.mark.slow
def test_blocks_learn_through_it_from_the_model_without_it(pico_model, pico_ids):
    steps = [KVCache(keys="int4", values="int4"), RTN(weights="int3", group_size=32)]
    wanted, errors = logits(pico_model, pico_ids), []
    for more in ([], [LKD(steps=20, batch=2)]):
        found = logits(compress.apply(copy.deepcopy(pico_model), [*steps, *more], pico_ids), pico_ids)
        errors.append(float((found - wanted).norm()))
    assert errors[1] < errors[0]


# Shipped


WRITTEN = {
    "static fp8": (FP8, "compressed-tensors", True),
    "token": ({"keys": "int4", "values": "nf4"}, "compressed-tensors", False),
    "static int8": ({"scale": "static"}, "dense", False),
    "keys alone": ({"values": "none", "scale": "static"}, "native", False),
    "zero points": ({"symmetric": False}, "native", False),
    "residual": ({"keys": "int2", "key_group": 16, "residual": 5}, "native", False),
    "by token": ({"key_group": None}, "native", False),
    "transformed": ({"key_group": None, "keys": "int4", "hadamard": "both"}, "native", False),
    "static, transformed": ({"scale": "static", "hadamard": "keys"}, "dense", False),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_read_back_as_it_was_computed(name, recipe, tmp_path, pico_ids):
    options, format_, stated = WRITTEN[name]
    steps = [KVCache(**options)] if format_ == "dense" else [KVCache(**options), RTN(group_size=32)]
    result = compress.run(recipe(*steps, save={"format": format_}), tmp_path)
    verified, section = result.report["verified"], result.report["kv_cache"]
    assert verified["own"] <= LOGITS and (format_ == "native" or verified["transformers"] <= LOGITS)
    assert section["stated"] == stated and len(section["attentions"]) == 3
    config = json.loads((tmp_path / "config.json").read_text())
    assert (CACHE_KEY in config) == (not stated)
    assert bool((config.get("quantization_config") or {}).get("kv_cache_scheme")) == stated
    record = [e for e in result.journal.entries if "does not read this cache policy" in e.message]
    assert len(record) == (not stated and format_ != "native")
    model, _ = compress.load(tmp_path)
    assert set(cache_policies(model).values()) == {KVCache(**options).cache}
    assert not hasattr(model.config, CACHE_KEY)
    if stated:  # others round, too, without being told by us
        other = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        with plain_torch():  # keys and values may round to other codes for a sum in another order
            assert near(logits(other, pico_ids), logits(model, pico_ids))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "stated"),
    [("llama", True), ("opt", False), ("phi3", True), ("gpt-neox", False), ("gemma2", True), ("falcon", False)],
)
def test_families_are_verified_with_transformers(family, stated, recipe, tiny_folder, tmp_path):
    """A scheme is stated where the reader can find heads in the configuration; else it could not load the checkpoint."""
    report = compress.run(recipe(KVCache(**FP8), model=tiny_folder(family)), tmp_path).report
    assert report["verified"]["transformers"] <= LOGITS and report["kv_cache"]["stated"] == stated


@pytest.mark.parametrize("step", [KVCache(**FP8), RTN(targets="*.self_attn.*", group_size=16)])
def test_dense_experts_beside_what_is_quantized_are_not_for_transformers(step, recipe, tiny_folder, tmp_path):
    asked = recipe(step, model=tiny_folder("qwen3-moe"))
    assert any("does not read dense experts" in note for note in compress.plan(asked).notes)
    verified = compress.run(asked, tmp_path).report["verified"]
    assert verified["own"] <= LOGITS and "does not read dense experts" in verified["skipped"]


def test_the_report_says_what_it_saves_and_what_it_costs(recipe, tmp_path):
    report = compress.run(recipe(KVCache(keys="int4"), RTN(group_size=32), save={"format": "native"}), tmp_path).report
    heads, width, attentions = 2, 32, 3
    sizes = report["kv_cache"]["bytes_per_token"]
    assert sizes["before"] == attentions * heads * width * 2 * 4
    assert sizes["after"] == attentions * heads * (width / 2 + width * 4 / 64 + width + 4)
    of = report["kv_cache"]["of"]
    assert set(of) == {"keys, int4 per channel and 64 tokens", "values, int8 per token and head"}
    low, high = of["values, int8 per token and head"], of["keys, int4 per channel and 64 tokens"]
    assert 0 < low["mean_error"] <= low["largest_error"] < high["mean_error"] < 0.2
    text = (tmp_path / "report.md").read_text()
    assert "## KV cache" in text and "--kv-cache-dtype fp8" in text and "| KV cache, bytes per token | 1536 |" in text


def test_a_report_without_it_has_no_word_of_it(served):
    report = copy.deepcopy(served.report) | {"kv_cache": None}
    shown, without = (markdown(RunResult.from_json(values)) for values in (served.report, report))
    assert "KV cache" in shown and "KV cache" not in without.split("## Journal")[0]


def test_a_killed_run_ends_with_the_same_bytes(recipe, stop, served, tmp_path):
    asked, wanted = recipe(KVCache(**FP8), RTN(group_size=32)), served.report
    stop(asked, tmp_path / "killed")
    report = compress.run(asked, tmp_path / "killed").report
    assert report["files"] == wanted["files"] and report["verified"] == wanted["verified"]
    assert "restore" in report["costs"]


def test_the_plan_counts_the_scales(recipe):
    asked = recipe(KVCache(**FP8), RTN(group_size=32))
    token = recipe(KVCache(keys="fp8_e4m3", values="fp8_e4m3"), RTN(group_size=32))
    assert compress.plan(asked).checkpoint_bytes - compress.plan(token).checkpoint_bytes == 3 * 2 * 4


@pytest.fixture(scope="module")
def served(recipe, tmp_path_factory):
    """A checkpoint that says so to servers; it is shared."""
    return compress.run(recipe(KVCache(**FP8), RTN(group_size=32)), tmp_path_factory.mktemp("served"))


def test_a_checkpoint_of_others_is_read_with_its_scheme(served, tmp_path, pico_ids):
    """Integers have a scheme, too, which is not written here; as llm-compressor writes it."""
    shutil.copytree(served.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] |= {"type": "int", "group_size": None, "observer": "minmax"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert {s.keys.name for s in cache_policies(compress.load(tmp_path)[0]).values()} == {"int8"}
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), pico_ids)
    with plain_torch():  # as above
        ours = logits(compress.load(tmp_path)[0], pico_ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": "mxfp4"}, "grid 'mxfp4' cannot hold keys and values; use int2, .*nf4, .*or none"),
        ({"values": "ternary"}, "grid 'ternary' cannot hold keys and values"),
        ({"values": "nf4_dq"}, "grid 'nf4_dq' cannot hold keys and values"),
        ({"keys": "fp8"}, "grid 'fp8' cannot hold"),
        ({"keys": 8}, "grid 8 cannot hold"),
        ({"keys": "none", "values": "none"}, "none leaves nothing to quantize"),
        ({"scale": "tensor"}, "input should be 'token' or 'static'"),
        ({"scale": "static", "symmetric": False}, "symmetric: false needs scale: token"),
        ({"scale": "static", "key_group": 32}, "key_group has no effect with scale: static; leave it out"),
        ({"keys": "none", "key_group": 32}, "key_group has no effect with keys: none; leave it out"),
        ({"key_group": 1}, "key_group: input should be greater than or equal to 2"),
        ({"residual": -1}, "residual: input should be greater than or equal to 0"),
        ({"hadamard": "queries"}, "hadamard: input should be 'keys', 'values' or 'both'"),
        ({"keys": "none", "hadamard": "keys"}, "keys has no effect on keys, which stay exact; write hadamard: values"),
        ({"values": "none", "hadamard": "both"}, "both has no effect on values, .* write hadamard: keys, or leave it"),
        ({"keys": "nf4", "symmetric": False}, "symmetric: false needs integer grids; nf4 has no zero point"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        KVCache(**options)


def test_what_is_rounded_already_is_told_before_the_work(pico_model, recipe):
    with pytest.raises(
        RecipeError, match=r"the same layers would be given a quantized KV cache twice, by passes\[0\] kv_cache and"
    ):
        recipe(KVCache(), RTN(), KVCache(keys="int4"))
    with pytest.raises(
        RecipeError, match="the layers are already given a quantized KV cache by .*; put drop_blocks before it"
    ):
        recipe(KVCache(), DropBlocks(count=1))
    parts = [KVCache(targets="*.q_proj"), KVCache(targets="*.k_proj")]
    message = r"passes\[1\] kv_cache: model.layers.0.self_attn.q_proj is already given a quantized KV cache by passes\[0\] kv_cache"
    with pytest.raises(TargetError, match=message):
        compress.plan(recipe(*parts))
    compress.apply(pico_model, [KVCache()])
    with pytest.raises(
        TargetError,
        match="is already given a quantized KV cache in the model that the passes start with; .* skip it with ignore",
    ):
        compress.apply(pico_model, [KVCache()])
    compress.apply(pico_model, [Wanda(sparsity=0.5)], torch.arange(64)[None])


@pytest.mark.parametrize("step", [SmoothQuant(), AWQ(group_size=32), ChannelPermutation()])
def test_what_proves_its_rewrites_of_attentions_comes_first(step, recipe):
    """Rounding makes of the least difference a whole step, so that a link through it cannot be seen."""
    with pytest.raises(RecipeError, match=f"given a quantized KV cache by .*; put {step.key()} before it"):
        recipe(KVCache(), step)
    follower = Unpruned() if step.effects(ANY_LAYER).prepares.fact == "masked" else Unrounded(group_size=32)
    compress.plan(recipe(step, KVCache(), follower))
    elsewhere = type(step).model_validate({**step.model_dump(mode="json"), "targets": ["*.mlp.*"]})
    compress.plan(recipe(KVCache(targets="*.self_attn.*"), elsewhere, follower))


def test_a_static_scale_needs_a_text(pico_model):
    with pytest.raises(CalibrationError, match="need token ids"):
        compress.apply(pico_model, [KVCache(scale="static")])


def test_an_encoder_has_no_cache(tiny):
    with pytest.raises(
        TargetError, match=r"passes\[0\] kv_cache: BertForMaskedLM has no KV cache .no attention module passes keys"
    ):
        compress.apply(tiny("bert"), [KVCache()])


def test_targets_without_an_attention_are_an_error(pico_model):
    with pytest.raises(TargetError, match="none of its 9 linears is in an attention module with a KV cache; widen"):
        compress.apply(pico_model, [KVCache(targets="*.mlp.*")])


@pytest.mark.parametrize(("projection", "kind"), [("k_proj", "keys"), ("v_proj", "values")])
def test_numbers_that_are_not_finite_are_found_in_calibration(projection, kind, pico_model, pico_ids):
    layer = pico_model.get_submodule(f"{ATTENTION}.{projection}")
    layer.register_forward_hook(lambda module, args, output: output * float("nan"))
    message = rf"passes\[0\] kv_cache model.layers.1.self_attn: {kind} contain NaN or infinity on the calibration text"
    with pytest.raises(NumericError, match=message):
        compress.apply(pico_model, [KVCache(scale="static")], pico_ids)
    assert ATTENTION not in cache_policies(pico_model)


def test_a_cache_that_nothing_enters_has_no_static_scale(pico_model, pico_ids):
    attention = pico_model.get_submodule(ATTENTION)
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(NumericError, match=rf"{ATTENTION}: no calibration token reached its cache; use scale: token"):
        compress.apply(pico_model, [KVCache(scale="static")], pico_ids)


@pytest.fixture(scope="module")
def dense(recipe, tmp_path_factory):
    """A checkpoint with a rounded cache, stored dense; it is shared."""
    asked = recipe(KVCache(scale="static"), save={"format": "dense", "verify": "own"})
    return compress.run(asked, tmp_path_factory.mktemp("dense")).folder


@pytest.fixture
def damaged(dense, tmp_path):
    """A copy of it that may be damaged."""
    return shutil.copytree(dense, tmp_path / "out")


def described(folder, change):
    config = json.loads((folder / "config.json").read_text())
    config[CACHE_KEY] = change(config[CACHE_KEY])
    (folder / "config.json").write_text(json.dumps(config))


def stored(folder, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SHARD).items()}
    change(tensors)
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: stored(f, lambda t: t.pop(f"{ATTENTION}.k_scale")), f"{ATTENTION}.k_scale is missing in "),
        (
            lambda f: stored(f, lambda t: t[f"{ATTENTION}.v_scale"].zero_()),
            r"v_scale in .* is \[0.0\], not one positive number",
        ),
        (lambda f: described(f, lambda c: {**c, "model.layers.9.self_attn": c[ATTENTION]}), "9.self_attn has no cache"),
        (
            lambda f: described(f, lambda c: {ATTENTION: {**c[ATTENTION], "keys": "int99"}}),
            "config.json: grid 'int99' is not known",
        ),
        (lambda f: described(f, lambda c: ["all"]), f"config.json: {CACHE_KEY} is no object"),
    ],
)
def test_a_damaged_checkpoint_is_an_error(damage, message, damaged):
    damage(damaged)
    with pytest.raises(ModelError, match=message):
        compress.load(damaged)


def test_another_scale_than_was_computed_is_found(damaged, recipe, monkeypatch):
    monkeypatch.setattr("compress.pipeline.checkpoint.Manifest.damaged", lambda self: [])
    stored(damaged, lambda tensors: tensors[f"{ATTENTION}.k_scale"].mul_(1.0001))
    with pytest.raises(VerificationError, match=f"the cache policy of {ATTENTION} differs after"):
        compress.run(recipe(KVCache(scale="static"), save={"format": "dense", "verify": "own"}), damaged)


def test_what_is_rounded_is_a_model_to_start_from(dense):
    assert len(compress.plan(compress.Recipe(model=str(dense), passes=[RTN(group_size=32)])).layers) == 21
    with pytest.raises(
        TargetError, match="is already given a quantized KV cache in the model that the passes start with"
    ):
        compress.plan(compress.Recipe(model=str(dense), passes=[KVCache()]))


def test_a_scheme_of_others_that_is_not_known_is_an_error(served, tmp_path):
    shutil.copytree(served.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] |= {"strategy": "attn_head"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="kv_cache_scheme.strategy = .attn_head. is not read"):
        compress.load(tmp_path)


def test_every_grid_that_is_allowed_quantizes():
    assert set(ALLOWED) >= {"int2", "int4", "int8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "nf4"}
    assert all(GRIDS[name].group_size is None for name in ALLOWED)
    x = torch.randn(64, 32)
    for name in ALLOWED:
        for group in (None, 64):
            found, _ = KVCache(keys=name, key_group=group).cache.update(AttentionCache(), {}, x, x)
            error = float((found - x).norm() / x.norm())
            assert 0 < error < 0.75, name
