"""Configs of mixtures of experts under the rules by which vLLM decides which modules are quantized.

vLLM builds routers and gates as linears, whatever transformers builds, and asks the config about each by its name and
the name of its class. The rules are written down here; `should_ignore_layer`, `find_matched_target`,
`is_layer_skipped` and `ModelOptQuantConfigBase.is_layer_excluded` of vLLM 0.32 are their source.
"""

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from model_families import experts, grouped
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import compress
from compress import RTN
from compress.checkpoint.formats.config_groups import ignored
from compress.checkpoint.save import dense_names

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "gpt-oss", "llama4", "qwen3-next", "jamba"]


def model_of(tiny, family):
    if family != "qwen2-moe":
        return tiny(family)
    config = AutoConfig.for_model("qwen2_moe", **grouped, **experts, shared_expert_intermediate_size=16)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def stored_in(folder):
    """Every stored tensor, by name."""
    return {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()}


def is_named(name, patterns, class_name=None):
    """Whether a name equals a pattern or matches one after 're:', or the class name contains one."""
    for pattern in patterns:
        if re.match(pattern[3:], name) if pattern.startswith("re:") else pattern == name:
            return True
        if class_name is not None and pattern.lower() in class_name.lower():
            return True
    return False


def parts_of(name):
    """The names in the checkpoint of a module that a server builds; an expert's `gate_up_proj` is stored as it is."""
    leaf = name.rpartition(".")[2]
    return [name.replace(leaf, part) for part in FUSED.get(leaf, (leaf,)) if ".experts." not in name] or [name]


def is_quantized(config, name, class_name="ReplicatedLinear"):
    """Whether vLLM creates quantized weights for a module, of compressed-tensors."""
    parts = parts_of(name)
    ignored = {is_named(part, config["ignore"]) for part in parts}
    assert len(ignored) == 1, f"the parts of {name} differ"
    targets = [target for group in config["config_groups"].values() for target in group["targets"]]
    by_parts = all(is_named(part, targets) for part in parts)
    return not ignored.pop() and (by_parts or is_named(name, targets) or is_named("", targets, class_name))


def is_quantized_by_awq(config, name):
    """Whether vLLM creates quantized weights for a module, of AutoAWQ: names are compared as substrings."""
    parts = parts_of(name)
    skipped = {any(entry in part for entry in config["modules_to_not_convert"]) for part in parts}
    assert len(skipped) == 1, f"the parts of {name} differ"
    return not skipped.pop()


def is_quantized_by_modelopt(config, name):
    """Whether vLLM creates quantized weights for a module, of Model Optimizer: names, substrings and shell patterns."""
    excluded, parts = config["ignore"], parts_of(name)
    skipped = {part in excluded for part in parts}
    assert len(skipped) == 1, f"the parts of {name} differ"
    return not (skipped.pop() or any(entry in name or fnmatch(name, entry) for entry in excluded))


def modules_of(stored, model):
    """(name of the module, whether it stores a plain weight) as vLLM builds them, but for embeddings and experts."""
    embeddings = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    plain = {}
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        if module not in embeddings and leaf in ("weight", "weight_packed", "qweight") and tensor.dim() == 2:
            plain[module] = tensor.is_floating_point() and tensor.element_size() > 1
    for fused, parts in FUSED.items():
        for first in [name for name in plain if name.endswith(f".{parts[0]}") and ".experts." not in name]:
            if all(first.replace(parts[0], part) in plain for part in parts):
                plain[first.replace(parts[0], fused)] = plain[first]
    return plain


@pytest.mark.parametrize("family", MIXTURES)
def test_a_server_quantizes_exactly_the_modules_that_are_stored_in_codes(tiny, family, tmp_path):
    model = model_of(tiny, family)
    compress.apply(model, [RTN(weights="fp8_e4m3", group_size="channel")])
    compress.save(model, tmp_path, "compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    modules = modules_of(stored_in(tmp_path), model)
    assert {name: is_quantized(config, name) for name in modules} == {n: not plain for n, plain in modules.items()}
    assert any(modules.values()) and not all(modules.values())
    assert len(config["ignore"]) <= 4  # patterns, not one name for each block


@pytest.mark.parametrize("family", MIXTURES)
def test_a_server_skips_exactly_the_modules_that_awq_stores_dense(tiny, family, tmp_path):
    model = model_of(tiny, family)
    compress.apply(model, [RTN(weights="int4", group_size=16, targets="*.o_proj")])
    compress.save(model, tmp_path, "awq")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    modules = modules_of(stored_in(tmp_path), model)
    assert {n: is_quantized_by_awq(config, n) for n in modules} == {n: not plain for n, plain in modules.items()}


def skips_experts(config, name):
    """Whether vLLM builds dense experts, about which it asks by the name of the module that holds them all."""
    if config["quant_method"] == "gptq":
        return any(re.match(pattern[2:], name) for pattern in config["dynamic"] if pattern.startswith("-:"))
    if config["quant_method"] == "awq":
        return any(entry in name for entry in config["modules_to_not_convert"])
    if config["quant_method"] == "modelopt":
        return not is_quantized_by_modelopt(config, name)
    return not is_quantized(config, f"{name}.0.gate_proj", "RoutedExperts")


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq", "modelopt"])
@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-moe"])
def test_experts_that_all_stay_dense_are_dense_for_a_server(tiny, family, form, tmp_path):
    model = model_of(tiny, family)
    fp8 = {"weights": "fp8_e4m3", "group_size": "channel", "activations": "fp8_e4m3"}
    step = RTN(targets="*.o_proj", **(fp8 if form == "modelopt" else {"weights": "int4", "group_size": 16}))
    compress.apply(model, [step])
    compress.save(model, tmp_path, form)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in stored_in(tmp_path)
    assert skips_experts(config, "model.layers.1.mlp.experts")
    compress.load(tmp_path)


def test_experts_of_which_some_are_compressed_are_named_one_by_one():
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(2) for j in range(2)]
    found = dense_names([*names, "lm_head"], {}, {names[0]})
    assert found == [names[1], "model.layers.1.mlp.experts.", "lm_head"]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_server_quantizes_exactly_the_modules_that_modelopt_stores_in_codes(tiny, family, tmp_path):
    model = model_of(tiny, family)
    compress.apply(model, [RTN(weights="fp8_e4m3", group_size="channel", activations="fp8_e4m3")])
    compress.save(model, tmp_path, "modelopt")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    modules = modules_of(stored_in(tmp_path), model)
    assert {n: is_quantized_by_modelopt(config, n) for n in modules} == {n: not plain for n, plain in modules.items()}


def test_experts_that_stay_in_one_tensor_are_dense_for_a_server(tiny, tmp_path):
    model = tiny("llama4")
    compress.apply(model, [RTN(weights="fp8_e4m3", group_size="channel")])
    compress.save(model, tmp_path, "compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.feed_forward.experts.gate_up_proj" in stored_in(tmp_path)
    assert not is_quantized(config, "model.layers.0.feed_forward.experts.0.gate_proj", "RoutedExperts")


def test_mixed_schemes_leave_routers_dense(tiny, tmp_path):
    model = tiny("qwen3-moe")
    overrides = {"*.down_proj": {"weights": "int8"}}
    compress.apply(model, [RTN(weights="int4", group_size=16, overrides=overrides)])
    compress.save(model, tmp_path, "compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    modules = modules_of(stored_in(tmp_path), model)
    assert {name: is_quantized(config, name) for name in modules} == {n: not plain for n, plain in modules.items()}


@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-next"])
def test_the_gate_of_a_shared_expert_stays_dense(tiny, family, tmp_path):
    model = model_of(tiny, family)
    gate = "model.layers.1.mlp.shared_expert_gate"
    before = model.get_submodule(gate).weight.clone()
    compress.apply(model, [RTN(weights="int8", group_size="channel")])
    compress.save(model, tmp_path, "native")
    assert torch.equal(stored_in(tmp_path)[f"{gate}.weight"], before)


def test_patterns_of_ignored_modules_match_these_modules_alone():
    outside = ["model.visual.merger.mlp.0", "model.visual.merger.mlp.2", "lm_head"]
    inside = [f"model.layers.{i}.mlp.gate" for i in range(3)] + ["model.layers.1.mlp.experts."]
    entries = ignored([*outside, *inside], {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts_up"})
    assert r"re:.*\.mlp\.gate$" in entries and "lm_head" in entries and len(entries) == 4
    named = [*outside, *inside[:3], "model.layers.1.mlp.experts.7.up_proj"]
    others = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts_up", "other.visual.merger.mlp.0.gate"]
    assert [is_named(name, entries) for name in (*named, *others)] == [True] * len(named) + [False] * len(others)
    assert ignored(["a.0.mlp.up", "a.1.mlp.up"], {"a.2.mlp.up"}) == ["a.0.mlp.up", "a.1.mlp.up"]
