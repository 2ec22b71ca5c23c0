"""compress inspect: layouts of all programs by their headers, and the digests of checkpoints of compress."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import compress
from compress import cli
from compress.checkpoint.inspection import inspect
from compress.errors import ModelError


@pytest.fixture(scope="module")
def written(pico, pico_ids, tmp_path_factory):
    model, tokenizer = compress.load(pico)
    compress.apply(model, [compress.Magnitude(pattern="2:4"), compress.RTN(weights="int4", group_size=32)], pico_ids)
    return compress.save(model, tmp_path_factory.mktemp("inspect") / "out", tokenizer=tokenizer)


@pytest.fixture
def folder(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "model"))


def by_name(found):
    return {module.name: module for module in found.modules}


def words(rows, columns):
    return torch.zeros(rows, columns, dtype=torch.int32)


# Layers of 64 outputs and 128 inputs, as the formats' owners write them
FOREIGN = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {
            "qweight": words(16, 64),
            "qzeros": words(4, 8),
            "scales": torch.ones(4, 64).half(),
            "g_idx": torch.zeros(128).int(),
        },
        ("int4", (64, 128), 32, 64 * 128),
    ),
    "gptq without bits": (
        {"quant_method": "gptq"},
        {"qweight": words(32, 64), "qzeros": words(1, 16), "scales": torch.ones(1, 64).half()},
        ("int8", (64, 128), "channel", 64 * 128),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4},
        {"qweight": words(128, 8), "qzeros": words(2, 8), "scales": torch.ones(2, 64).half()},
        ("int4", (64, 128), 64, 64 * 128),
    ),
    "bitsandbytes nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            "weight": torch.zeros(4096, 1, dtype=torch.uint8),
            "weight.absmax": torch.ones(128),
            "weight.quant_map": torch.ones(16),
            "weight.quant_state.bitsandbytes__nf4": torch.zeros(80, dtype=torch.uint8),
        },
        ("nf4", None, 64, 64 * 128),
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"weight": torch.zeros(64, 128, dtype=torch.int8), "SCB": torch.ones(64)},
        ("int8", (64, 128), "channel", 64 * 128),
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8"},
        {"weight": torch.zeros(64, 128).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 4)},
        ("fp8_e4m3", (64, 128), "32x32", 64 * 128),
    ),
    "pack-quantized": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
        {"weight_packed": words(64, 16), "weight_scale": torch.ones(64, 1), "weight_shape": torch.tensor([64, 128])},
        ("int4", (64, 128), "channel", 64 * 128),
    ),
    "nvfp4": (
        {"quant_method": "compressed-tensors"},
        {
            "weight_packed": torch.zeros(64, 64, dtype=torch.uint8),
            "weight_scale": torch.ones(64, 8).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.ones(1),
        },
        ("nvfp4", (64, 128), 16, 64 * 128),
    ),
    "torchao": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": 32}}},
        },
        {"_weight_qdata": torch.zeros(64, 128, dtype=torch.int8), "_weight_scale": torch.ones(64, 4)},
        ("Int8WeightOnlyConfig", None, 32, 64 * 128),
    ),
    "another": (
        {"quant_method": "zork"},
        {"codes": torch.zeros(8, dtype=torch.int16)},
        ("unknown (zork)", None, None, 8),
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_layouts_of_other_programs(case, tmp_path):
    config, tensors, (grid, shape, group, weights) = FOREIGN[case]
    tensors = {f"model.layers.0.up_proj.{name}": t.contiguous() for name, t in tensors.items()}
    save_file({**tensors, "model.norm.weight": torch.ones(128)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = inspect(tmp_path)
    module = by_name(found)["model.layers.0.up_proj"]
    assert (module.grid, module.shape, module.group_size, module.weights) == (grid, shape, group, weights)
    assert module.size_bytes == sum(t.nbytes for t in tensors.values())
    assert by_name(found)["model.norm"].grid == "dense" and config["quant_method"] in found.method


def test_a_checkpoint_of_compress(written):
    found = inspect(written)
    module = by_name(found)["model.layers.0.mlp.up_proj"]
    assert (module.grid, module.group_size, module.parts) == ("int4", 32, ("sparse",)) and "2:4" in module.stored_as
    stored = json.loads((written / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert found.size_bytes == stored  # no biases in this model
    assert found.weights == sum(
        p.numel() for p in compress.load(str(Path(__file__).parents[1] / "pico/model"))[0].parameters()
    )
    kinds = {group.name: group.count for group in found.groups()}
    assert kinds["model.layers.*.mlp.up_proj"] == 3


def test_zeros_are_counted_when_asked_for(written):
    assert by_name(inspect(written))["model.layers.0.mlp.up_proj"].zeros is None
    zeros = by_name(inspect(written, values=True))
    assert zeros["model.layers.0.mlp.up_proj"].zeros >= 0.5 and zeros["model.norm"].zeros == 0


def test_gguf_files(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(
        "blk.0.ffn_up.weight",
        torch.zeros(64, 18 * 4, dtype=torch.uint8).numpy(),
        raw_dtype=gguf.GGMLQuantizationType.Q4_0,
    )
    writer.add_tensor("output_norm.weight", torch.ones(128).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = by_name(inspect(path))
    up = found["blk.0.ffn_up"]
    assert (up.grid, up.shape, up.group_size, up.bits_per_weight) == ("Q4_0", (64, 128), 32, 4.5)
    assert found["output_norm"].grid == "dense"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ModelError, match=r"model\.gguf is truncated or not a GGUF file"):
        inspect(path)


def test_the_command(written, folder):
    shown = CliRunner().invoke(cli.main, ["inspect", str(written), "--verify"])
    assert shown.exit_code == 0 and "files: all as SHA256SUMS says" in shown.output
    assert "bits per weight" in shown.output
    made = json.loads(CliRunner().invoke(cli.main, ["inspect", str(written), "--json"]).stdout)
    assert made["totals"]["bytes"] == sum(
        module["bytes"] if "bytes" in module else module["size_bytes"] for module in made["modules"]
    )
    data = bytearray((folder / "config.json").read_bytes())
    data[5] ^= 1
    (folder / "config.json").write_bytes(data)
    (folder / "tokenizer.json").unlink()
    failed = CliRunner().invoke(cli.main, ["inspect", str(folder), "--verify"])
    lines = failed.stderr.splitlines()
    assert failed.exit_code == 2 and len(lines) == 3
    assert "config.json is damaged: its sha256 is" in lines[0] and "tokenizer.json is missing" in lines[1]
    assert lines[2].startswith("error: model: 2 files of") and "fetch them again" in lines[2]


@pytest.mark.parametrize("source", ["nothing", "config.json"])
def test_what_cannot_be_inspected(source, written):
    with pytest.raises(ModelError, match="no folder .*; use a local folder, a .safetensors file, or a .gguf file"):
        inspect(written / source)
