"""Every reader refuses keys, values and tensors that it does not read, and configs of published checkpoints load."""

import json
import shutil

import pytest
import torch
from model_families import tiny_model
from safetensors.torch import load_file, save_file
from tolerances import near_rounded

import compress
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.opening import open_model
from compress.errors import ModelError
from compress.layers.transforms.rounding import InputRounding

PASSES = {
    "native": {"rtn": {"weights": "int4", "group_size": 16}},
    "compressed-tensors": {"rtn": {"weights": "int4", "group_size": 16}},
    "gptq": {"rtn": {"weights": "int4", "group_size": 32}},
    "awq": {"rtn": {"weights": "int4", "group_size": 16, "symmetric": False}},
    "bitsandbytes": {"rtn": {"weights": "nf4", "group_size": 32}},
    "mlx": {"rtn": {"weights": "uint4", "group_size": 32}},
    "modelopt": {"rtn": {"weights": "fp8_e4m3", "group_size": "channel", "activations": "fp8_e4m3"}},
    "dense": {"rtn": {"weights": "int4", "group_size": 16}},
}
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(format) -> the folder of a tiny quantized Llama."""
    folders = {}

    def write(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("written") / "model"
            model = tiny_model("llama", hidden_size=64, intermediate_size=64, num_key_value_heads=4)
            compress.save(compress.apply(model, [PASSES[name]], torch.zeros(2, 8).long()), folders[name], format=name)
        return folders[name]

    return write


def changed(folder, out, config=None, tensors=None):
    """A copy of a checkpoint with changes of its `quantization_config` and of its tensors."""
    shutil.copytree(folder, out)
    if config is not None:
        values = json.loads((out / "config.json").read_text())
        for key in values.keys() & {"quantization_config", "quantization"}:
            config(values[key])
        (out / "config.json").write_text(json.dumps(values))
    if tensors is not None:
        for path in out.glob("*.safetensors"):
            stored = load_file(path)
            if any(name.startswith(LAYER) for name in stored):
                tensors(stored)
                save_file(stored, path)
    return out


@pytest.mark.parametrize("name", [name for name in PASSES if name != "dense"])
def test_an_unknown_key_is_an_error(name, written, tmp_path):
    folder = changed(written(name), tmp_path / "x", lambda values: values.update(not_known_yet=[1, 2]))
    with pytest.raises(
        ModelError, match=rf"config.json of {folder} .*\(not_known_yet = \[1, 2\] is not known; known keys: "
    ):
        compress.load(folder)


VALUES = {
    "native": ("layers", [], "an object"),
    "compressed-tensors": ("quantization_status", "calibration", "compressed, frozen"),
    "gptq": ("bits", 5, "2, 3, 4, 8"),
    "awq": ("zero_point", "yes", "True, False"),
    "bitsandbytes": ("bnb_4bit_quant_storage", "int4", "uint8, int8, float16, bfloat16, float32, float64, null"),
    "mlx": ("group_size", 16, "128, 64, 32"),
}


@pytest.mark.parametrize("name", VALUES)
def test_another_value_is_an_error(name, written, tmp_path):
    key, value, accepted = VALUES[name]
    folder = changed(written(name), tmp_path / "x", lambda values: values.update({key: value}))
    with pytest.raises(ModelError) as error:
        compress.load(folder)
    assert f"{key} = {value!r} is not read; accepted: {accepted}" in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("storage", ["int8", "float16", "bfloat16", "float32", "float64"])
def test_4_bit_codes_of_bitsandbytes_are_read_in_each_dtype_of_storage(storage, written, tmp_path):
    def stored_as(stored):
        for name in [name for name in stored if name.removesuffix(".weight") + ".weight.absmax" in stored]:
            stored[name] = stored[name].flatten().view(getattr(torch, storage)).view(-1, 1)

    folder = changed(
        written("bitsandbytes"), tmp_path / "x", lambda values: values.update(bnb_4bit_quant_storage=storage), stored_as
    )
    expected, _ = compress.load(written("bitsandbytes"))
    model, _ = compress.load(folder)
    weights = model.get_submodule(LAYER).weight, expected.get_submodule(LAYER).weight
    assert torch.equal(*weights)
    opened = open_model(str(folder))
    opened.bring(opened.blocks[1])
    assert torch.equal(opened.model.get_submodule(LAYER).weight, weights[0])


@pytest.mark.parametrize("opened_by", [compress.load, lambda path: open_model(str(path))], ids=["load", "open_model"])
@pytest.mark.parametrize("extra", [f"{LAYER}.weight_not_known", "model.layers.1.self_attn.q_norm.weight", "scale"])
@pytest.mark.parametrize("name", PASSES)
def test_a_tensor_that_is_not_read_is_an_error(name, extra, opened_by, written, tmp_path):
    folder = changed(written(name), tmp_path / "x", tensors=lambda stored: stored.update({extra: torch.ones(2)}))
    with pytest.raises(ModelError, match=f"^model: {folder} holds tensors that are not read: {extra}; "):
        opened_by(folder)


@pytest.mark.parametrize("name", PASSES)
def test_a_missing_tensor_is_an_error(name, written, tmp_path):
    def without(stored):
        del stored[next(key for key in sorted(stored, reverse=True) if key.startswith(LAYER))]

    folder = changed(written(name), tmp_path / "x", tensors=without)
    with pytest.raises(ModelError, match=f"{LAYER}"):
        compress.load(folder)


def test_tensors_that_models_compute_are_left_out_and_parts_of_other_classes_copied(written, tmp_path):
    frequencies = "model.layers.1.self_attn.rotary_emb.inv_freq"
    extra = {frequencies: torch.ones(4), "mtp.fc.weight": torch.ones(2, 2)}
    folder = changed(written("dense"), tmp_path / "x", tensors=lambda stored: stored.update(extra))
    opened = open_model(str(folder))
    assert f"{frequencies} are left out: the model computes them, or ignores them" in opened.notes
    assert list(opened.undeclared) == ["mtp.fc.weight"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bitsandbytes", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is fp4, but the tensors of .* say nf4"),
        ("bitsandbytes", {"bnb_4bit_use_double_quant": True}, "bnb_4bit_use_double_quant is True, but the tensors of"),
        ("bitsandbytes", {"load_in_8bit": True}, "load_in_8bit is True, but the tensors of .* say False"),
        ("gptq", {"bits": 8}, "qweight has 8 words for 64 inputs, but bits is 8"),
        ("gptq", {"group_size": 64}, "has 2 groups of scales for 64 inputs, but group_size is 64"),
        ("gptq", {"dynamic": {"+:.*": {"adapter": {}}}}, r"dynamic\.\+:\.\*\.adapter = {} is not known"),
        ("gptq", {"rotation": "hadamard"}, "rotation = 'hadamard' is not read; accepted: null, False"),
        ("awq", {"group_size": 32}, "has 4 groups of scales for 64 inputs, but group_size is 32"),
        ("awq", {"backend": "llm-awq"}, "backend = 'llm-awq' is not read"),
        ("modelopt", {"quant_algo": "FP8"}, "quant_algo is FP8, but the tensors of .* are those of no algorithm"),
        ("modelopt", {"quant_algo": "NVFP4"}, "quant_algo is NVFP4, but .* fp8_e4m3, .* inputs in floating point"),
        ("bitsandbytes", {"llm_int8_threshold": -1}, "llm_int8_threshold = -1 is not read; accepted: a number of at"),
        ("bitsandbytes", {"llm_int8_threshold": float("nan")}, "llm_int8_threshold = nan is not read"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_an_error(name, changes, message, written, tmp_path):
    folder = changed(written(name), tmp_path / "x", lambda values: values.update(changes))
    with pytest.raises(ModelError, match=message):
        compress.load(folder)


def test_a_layer_without_any_stored_tensor_is_named_with_the_folder(pico, tmp_path):
    """The head of a tied model is not stored."""
    model = compress.apply(compress.load(pico)[0], [PASSES["compressed-tensors"]], torch.zeros(2, 8).long())
    compress.save(model, tmp_path / "saved", format="compressed-tensors")
    folder = changed(tmp_path / "saved", tmp_path / "x", lambda values: values.update(ignore=[]))
    with pytest.raises(ModelError, match=rf"lm_head lacks its tensor weight_packed \(in {folder}\); write"):
        compress.load(folder)


# As the hub has them: Qwen2.5-GPTQ-Int4, GPTQModel, AutoAWQ, GPTQModel's AWQ, unsloth's bitsandbytes.
PUBLISHED = {
    "gptq": [
        {"batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01}
        | {"dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "max_input_length": None}
        | {"model_seqlen": None, "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None}
        | {"pad_token_id": None, "static_groups": False, "tokenizer": None, "true_sequential": True}
        | {"use_cuda_fp16": False, "use_exllama": True, "model_file_base_name": "model", "model_name_or_path": None},
        {"dynamic": None, "lm_head": False, "meta": {"damp_percent": 0.05, "uri": "x"}, "pack_dtype": "int32"},
        {"backend": "auto_round:gptq:exllamav2", "data_type": "int", "iters": 200, "autoround_version": "0.4"}
        | {"enable_quanted_input": True, "quant_block_list": None, "scale_dtype": "torch.float16", "act_bits": 16},
    ],
    "awq": [
        {"version": "GEMM", "modules_to_not_convert": None, "do_fuse": False, "fuse_max_seq_len": None}
        | {"backend": "autoawq", "exllama_config": None, "modules_to_fuse": None},
        {"checkpoint_format": "gemm", "format": "gemm", "sym": False, "desc_act": False, "lm_head": False, "meta": {}},
    ],
    "bitsandbytes": [
        {"_load_in_4bit": True, "_load_in_8bit": False, "llm_int8_skip_modules": ["lm_head"]}
        | {"bnb_4bit_compute_dtype": "bfloat16", "llm_int8_enable_fp32_cpu_offload": False}
    ],
    "compressed-tensors": [
        {"global_compression_ratio": 1.2, "transform_config": {}, "version": "0.9.4.a20250417", "kv_cache_scheme": None}
        | {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "ignore": [], "targets": []}}
        | {"quantization_status": "frozen"},
    ],
}


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, configs in PUBLISHED.items() for i in range(len(configs))]
)
def test_configs_of_published_checkpoints_are_read(name, number, written, tmp_path):
    folder = changed(written(name), tmp_path / "x", lambda values: values.update(PUBLISHED[name][number]))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert near_rounded(compress.load(folder)[0](ids).logits, compress.load(written(name))[0](ids).logits)


# ---- what compressed-tensors states of weights and inputs ----


def arguments(**values):
    """QuantizationArgs as llm-compressor writes them."""
    common = {"actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8}
    common |= {"observer": None, "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "int"}
    return common | values


WEIGHTS = arguments(dynamic=False, observer="minmax", strategy="channel")
STATIC = {"dynamic": False, "strategy": "tensor"}


def scheme(inputs, weights=WEIGHTS, layout="int-quantized", **group):
    """The scheme that the reader finds in a config group."""
    values = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    config |= {"config_groups": {"group_0": values | group}, "ignore": ["lm_head"]}
    reader = FORMATS["compressed-tensors"].of_config(config)
    return reader.schemes(config, {"a": (32, 64)}, {})["a"]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"num_bits": 4, "type": "float"}, "type = 'float' is not read; accepted: int"),
        ({"num_bits": 6}, "num_bits = 6 is not read; accepted: 4, 8"),
        ({"strategy": "tensor"}, "strategy = 'tensor' is not read; accepted: token, group"),
        ({"strategy": "channel"}, "strategy = 'channel' is not read; accepted: token, group"),
        ({"dynamic": False}, "strategy = 'token' is not read; accepted: tensor"),
        ({"dynamic": "local", "strategy": "tensor_group", "group_size": 16}, "dynamic = 'local' is not read"),
        ({**STATIC, "symmetric": False}, "symmetric = False is not read; accepted: True"),
        ({"type": "float", "symmetric": False}, "symmetric = False is not read; accepted: True"),
        ({"strategy": "group"}, "group_size = None is not read; accepted: an integer"),
        ({"group_size": 32}, "group_size = 32 is not read; accepted: null"),
        ({"actorder": "group"}, "actorder = 'group' is not read"),
        ({"scale_dtype": "torch.uint8"}, "scale_dtype = 'torch.uint8' is not read"),
        ({"not_known": 1}, "not_known = 1 is not known; known keys: num_bits"),
    ],
)
def test_inputs_that_a_layer_does_not_express_are_an_error(inputs, said):
    with pytest.raises(ValueError, match=r"^config_groups\.group_0\.input_activations\.") as error:
        scheme(arguments(**inputs))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"output_activations": arguments()}, "group_0.output_activations = {"),
        ({"weights": None}, "group_0.weights = None is not read; accepted: an object"),
        ({"targets": ["LlamaAttention"]}, "targets holds 'LlamaAttention', which is no linear of the model"),
        ({"weights": {**WEIGHTS, "type": "float"}}, "weights.type = 'float' is not read; accepted: int"),
        ({"weights": {**WEIGHTS, "dynamic": True}}, "weights.dynamic = True is not read"),
        ({"weights": {**WEIGHTS, "strategy": "block"}}, "weights.strategy = 'block' is not read"),
        ({"not_known": 1}, "group_0.not_known = 1 is not known"),
    ],
)
def test_groups_that_state_more_are_an_error(group, said):
    with pytest.raises(ValueError) as error:
        scheme(arguments(), **group)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "inputs",
    [
        arguments(),
        arguments(symmetric=False),
        arguments(num_bits=4),
        arguments(num_bits=4, symmetric=False),
        arguments(strategy="group", group_size=16),
        arguments(type="float"),
    ],
)
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(inputs):
    owner = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    (stated,) = scheme(inputs).transforms
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)) + 0.3
    linear = torch.nn.Linear(64, 32)
    linear.quantization_status = owner.QuantizationStatus.FROZEN
    expected = forward_quantize(linear, x, "input", owner.QuantizationArgs(**inputs))
    computed = InputRounding(stated, (32, 64), {})(x)
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (2 ** inputs["num_bits"] - 1)
    same = (computed - expected).abs() <= 1e-5 * (1 + expected.abs())
    assert same.float().mean() > 0.995 and bool(((computed - expected).abs() <= 1.01 * step).all())


def test_the_group_of_each_column_is_read():
    weights = arguments(dynamic=False, strategy="group", group_size=16, num_bits=4, actorder="group")
    layer, reader = scheme(None, weights, "pack-quantized"), FORMATS["compressed-tensors"]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(64, generator=generator)
    index = (torch.arange(64)[order.argsort()] // 16).int()
    codes = torch.randint(0, 16, (32, 64), generator=generator)
    packed = (codes.view(32, 8, 8) << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    scale = torch.rand(32, 4, generator=generator)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_g_idx": index}
    stored["weight_shape"] = torch.tensor([32, 64])
    (part,), _ = reader.decode(stored, layer)
    assert torch.equal(part.dense(torch.float32), (codes - 8) * scale[:, index.long()])
    (part,), _ = reader.decode({**stored, "weight_g_idx": torch.full((64,), -1).int()}, layer)  # in order
    assert torch.equal(part.dense(torch.float32), (codes - 8) * scale.repeat_interleave(16, 1))


@pytest.mark.parametrize(("zeros", "fails"), [(torch.zeros(32, 1).char(), False), (torch.ones(32, 1).char(), True)])
def test_zero_points_of_symmetric_weights_must_be_zero(zeros, fails):
    reader, layer = FORMATS["compressed-tensors"], scheme(arguments())
    stored = {"weight": torch.ones(32, 64).char(), "weight_scale": torch.ones(32, 1), "weight_zero_point": zeros}
    if fails:
        with pytest.raises(ValueError, match="weight_zero_point is not zero, but its config says symmetric"):
            reader.decode(stored, layer)
    else:
        assert reader.decode(stored, layer)


def test_every_format_is_tested():
    assert sorted(FORMATS) == sorted([*PASSES, "gguf"])  # tests/checkpoint/sources/test_gguf_contents.py has the last
