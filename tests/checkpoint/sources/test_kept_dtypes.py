"""The dtype of a tensor is that of transformers, whatever the dtype of the run; one folder holds one set of weights."""

import json
import shutil

import numpy as np
import pytest
import torch
from model_families import config_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import compress
from compress.checkpoint.opening import open_model
from compress.errors import ModelError

GLM = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GLM |= {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
GLM |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def folder(request, tmp_path_factory):
    """A tiny model in bfloat16 whose router has a float32 bias that bfloat16 does not hold."""
    torch.manual_seed(0)
    config = config_of("deepseek-v3") if request.param == "deepseek_v3" else AutoConfig.for_model("glm4_moe", **GLM)
    model = AutoModelForCausalLM.from_config(config)
    path = tmp_path_factory.mktemp("model")
    model.to(torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    tensors = {n: 20 + torch.rand(t.shape) / 64 if n.endswith(BIAS) else t for n, t in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def biases(model):
    """The biases of the routers by name."""
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith(BIAS)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_bias_of_a_router_is_computed_as_transformers_computes_it(folder, dtype):
    ids = torch.arange(16).view(2, 8)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    expected = biases(theirs)
    assert expected and all(tensor.dtype is torch.float32 for tensor in expected.values())
    loaded, _ = compress.load(folder, dtype=str(dtype).removeprefix("torch."))
    opened = open_model(str(folder), str(dtype).removeprefix("torch."))
    with torch.no_grad(), opened.streaming() as model:
        logits = theirs(ids).logits
        for ours in (loaded(ids).logits, model(ids).logits):
            assert (ours - logits).abs().max() <= 0.02 * logits.abs().max()
    for name, tensor in biases(loaded).items():
        assert tensor.dtype is torch.float32 and torch.equal(tensor, expected[name])


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize("form", ["native", "dense"])
def test_a_run_stores_it_in_float32(folder, dtype, form, tmp_path):
    calibration = tmp_path / "ids.npy"
    np.save(calibration, torch.randint(0, 64, (4, 16)).numpy())
    data = {
        "model": str(folder),
        "dtype": dtype,
        "passes": [{"rtn": {"weights": "int8", "group_size": 16}}],
        "eval": None,
    }
    data |= {"calibration": {"source": str(calibration), "sequences": None, "length": None}, "save": {"format": form}}
    data["save"]["dtype"] = "bfloat16"
    result = compress.run(compress.Recipe.from_data(data), tmp_path / "out", progress=False)
    stored = {}
    for path in result.folder.glob("*.safetensors"):
        stored |= load_file(path)
    source = load_file(folder / "model.safetensors")
    names = [name for name in source if name.endswith(BIAS)]
    assert names and all(torch.equal(stored[name], source[name]) for name in names)
    assert result.report["size"]["tensor_bytes"] == result.report["predicted"]["tensor_bytes"]


def test_a_stale_index_beside_a_whole_file_is_an_error(pico, tmp_path):
    tensors = load_file(f"{pico}/model.safetensors")
    shutil.copy(f"{pico}/config.json", tmp_path)
    for name in ("model.safetensors", "model-00001-of-00001.safetensors"):
        save_file(tensors, tmp_path / name)
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ModelError, match="holds the shards of model.safetensors.index.json and model.safetensors, which"
    ):
        open_model(str(tmp_path))


def test_a_tensor_in_two_files_is_an_error(pico, tmp_path):
    tensors = load_file(f"{pico}/model.safetensors")
    shutil.copy(f"{pico}/config.json", tmp_path)
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "b.safetensors")
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight is in .*a\.safetensors and in .*b\.safetensors; remove one"
    ):
        open_model(str(tmp_path))


ROUTERS = {
    "ernie4_5_moe": {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
}
"""Families whose routers are created with dtype=torch.float32, by their options."""


@pytest.mark.parametrize("stated", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", list(ROUTERS))
def test_a_router_that_its_class_creates_in_float32_is_computed_and_saved_in_float32(family, stated, tmp_path):
    torch.manual_seed(0)
    common = {name: GLM[name] for name in list(GLM)[:6]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **common, **ROUTERS[family]))
    model.to(stated).save_pretrained(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    routers = [name for name in stored if ".gate." in name]
    stored |= {name: torch.rand(stored[name].shape) for name in routers}
    save_file(stored, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    ours, _ = compress.load(tmp_path / "model", dtype="bfloat16")
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        logits = theirs(ids).logits
        assert (ours(ids).logits - logits).abs().max() <= 0.02 * logits.abs().max()
    for name in routers:
        weight, expected = ours.state_dict()[name], theirs.state_dict()[name]
        assert weight.dtype is expected.dtype is torch.float32 and torch.equal(weight, expected)
    np.save(tmp_path / "ids.npy", np.zeros((2, 16), dtype=np.int64))
    step = {"rtn": {"group_size": 16}}  # all linears; HunYuan's router is one
    for dtype in ("bfloat16", "float32"):
        recipe = {"model": str(tmp_path / "model"), "dtype": dtype, "passes": [step]}
        recipe |= {"save": {"format": "native", "dtype": "bfloat16"}, "eval": None}
        recipe |= {"calibration": {"source": str(tmp_path / "ids.npy"), "sequences": 2, "length": 16}}
        compress.run(compress.Recipe(**recipe), tmp_path / dtype, progress=False)
        written = {}
        for path in (tmp_path / dtype).glob("*.safetensors"):
            written |= load_file(path)
        for name in routers:
            assert written[name].dtype is torch.float32 and torch.equal(written[name], stored[name])
