"""The checkpoint writer: shards block by block, then index, configuration, tokenizer and digests."""

import errno
import hashlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from compress.blockwise.quantized_embeddings import embeddings_of
from compress.checkpoint.codec import FormatCodec, Outside
from compress.checkpoint.exact import ExactCodec, restore_exact
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.writer import CheckpointWriter
from compress.errors import SaveError
from compress.layers.linear import CompressedLinear, replace_linear
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

NATIVE = FORMATS["native"]
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def opened(tiny, in_memory):
    """A model of two blocks with one quantized linear."""
    opened = in_memory(tiny("llama", num_hidden_layers=2))
    layer = replace_linear(opened.model, UP)
    layer.put(quantize(layer.weight, GRIDS["int4"], group_size=16))
    return opened


def written(opened, folder, dtype=torch.bfloat16):
    """Write all of a model in format native."""
    writer = CheckpointWriter(opened, FormatCodec(NATIVE, torch.float32), folder, folder)
    for block in opened.blocks:
        writer.add(block)
    assert writer.close(NATIVE, Outside(embeddings_of(opened), {}), dtype, {"extra/note.txt": "note"}) == []
    return writer


def test_every_tensor_is_in_the_shard_that_the_index_names(opened, tmp_path):
    writer = written(opened, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = {name: file for file in set(index["weight_map"].values()) for name in load_file(tmp_path / file)}
    assert names == index["weight_map"] and list(index["weight_map"]) == sorted(names)
    total = sum(t.nbytes for file in set(names.values()) for t in load_file(tmp_path / file).values())
    assert index["metadata"] == {"total_size": total}
    shard = tmp_path / "model-00002-of-00003.safetensors"
    entry = writer.shards["model.layers.0"]
    assert entry.sha256 == hashlib.sha256(shard.read_bytes()).hexdigest() and list(entry.schemes) == [UP]
    assert names["lm_head.weight"] == "model-00001-of-00003.safetensors"
    assert (tmp_path / "extra" / "note.txt").read_text() == "note"


def test_the_configuration_states_dtype_class_and_schemes(opened, tmp_path):
    written(opened, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert list(config["quantization_config"]["layers"]) == [UP] and "_name_or_path" not in config


def test_the_digests_are_those_of_all_files_in_the_folder(opened, tmp_path):
    written(opened, tmp_path)
    listed = dict(line.split("  ")[::-1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    files = {path.name: path for path in tmp_path.iterdir() if path.is_file() and path.name != "SHA256SUMS"}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def test_a_full_disk_is_an_error_that_says_how_to_resume(opened, tmp_path, monkeypatch):
    def fail(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(opened.model.generation_config, "save_pretrained", fail)
    with pytest.raises(SaveError, match="the disk is full; finished blocks are kept"):
        written(opened, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_the_exact_state_keeps_a_mask_and_the_memory_order(opened, tmp_path):
    block, layer = opened.blocks[1], CompressedLinear.of(opened.blocks[1].module.mlp.down_proj)
    mask = torch.rand(layer.shape) > 0.5
    layer.put((layer.weight * mask).T.contiguous().T, mask)
    block.module.mlp.down_proj = layer
    expected, strides = layer.weight.clone(), layer.weight.stride()
    entry = CheckpointWriter(opened, ExactCodec(), tmp_path, tmp_path).add(block)
    block.module.mlp.down_proj = CompressedLinear(torch.zeros(layer.shape), None)
    assert restore_exact(tmp_path, entry, block.module, torch.device("cpu"))
    restored = block.module.mlp.down_proj
    assert torch.equal(restored.weight, expected) and restored.weight.stride() == strides
    assert torch.equal(restored.mask, mask)
    (tmp_path / entry.file).write_bytes(b"damaged")
    assert not restore_exact(tmp_path, entry, block.module, torch.device("cpu"))


def test_files_do_not_depend_on_how_the_tokenizer_was_read(opened, pico, tmp_path):
    """transformers adds `local_files_only` where the hub is switched off, and `is_local` for a local folder."""
    configs = []
    for circumstances in ({}, {"local_files_only": True}):
        tokenizer = AutoTokenizer.from_pretrained(pico, **circumstances)
        folder = tmp_path / f"{len(circumstances)}"
        folder.mkdir()
        written(replace(opened, tokenizer=tokenizer), folder)
        configs.append((folder / "tokenizer_config.json").read_text())
    assert configs[0] == configs[1] and not {"is_local", "local_files_only"} & json.loads(configs[0]).keys()
    assert AutoTokenizer.from_pretrained(folder).encode("a text") == tokenizer.encode("a text")
