"""Checkpoint: what it states of a folder, the model without weights, blocks with codes and masks, and digests."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compress
from compress.checkpoint.checkpoint import Checkpoint
from compress.errors import ModelError
from compress.layers.linear import CompressedLinear
from compress.models.structure.blocks import find_blocks


@pytest.fixture(scope="module")
def written(pico, pico_ids, tmp_path_factory):
    """A checkpoint of format native with codes, and masks that no tensor stores."""
    model, tokenizer = compress.load(pico)
    steps = [compress.Magnitude(targets="*.up_proj"), compress.RTN(ignore="*.up_proj", group_size=32)]
    compress.apply(model, steps, pico_ids)
    folder = tmp_path_factory.mktemp("checkpoint") / "out"
    return compress.save(model, folder, tokenizer=tokenizer, sparse="off")


def test_it_states_what_the_files_hold(written):
    checkpoint = Checkpoint.open(str(written))
    stored = {name: t for path in Path(written).glob("*.safetensors") for name, t in load_file(path).items()}
    assert {name: place.header.shape for name, place in checkpoint.stored.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert len(checkpoint.schemes) == 18 and checkpoint.format.name == "native" and not checkpoint.caches
    assert checkpoint.stated.masked == {f"model.layers.{i}.mlp.up_proj" for i in range(3)}
    assert {parameter.device.type for parameter in checkpoint.skeleton().parameters()} == {"meta"}


def test_a_block_has_the_layers_that_load_gives(written):
    checkpoint, (loaded, _) = Checkpoint.open(written, "float32"), compress.load(written, "float32")
    block, other = (find_blocks(model)[1] for model in (checkpoint.skeleton(), loaded))
    checkpoint.block(block, checkpoint.stated.masked)
    layers = {n: m for n, m in block.module.named_modules() if isinstance(m, CompressedLinear)}
    assert len(layers) == 7
    for name, layer in layers.items():
        assert torch.equal(layer.weight, other.module.get_submodule(name).weight)
        if "up_proj" not in name:
            assert layer.sha256() == other.module.get_submodule(name).sha256()


def test_a_changed_file_is_found(written, tmp_path):
    Checkpoint.open(written).verify()
    for path in Path(written).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + " ")
    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        Checkpoint.open(tmp_path).verify()


def test_a_path_is_no_hub_id():
    with pytest.raises(ModelError, match="no folder someone/model"):
        Checkpoint.open(Path("someone/model"))
