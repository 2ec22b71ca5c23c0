"""Files appear whole or not at all, under the names and in the layout that the stock model has."""

import errno
import hashlib

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from compress.checkpoint import save
from compress.checkpoint.containers import files
from compress.checkpoint.containers import safetensors_writing as st
from compress.checkpoint.formats import FORMATS
from compress.errors import SaveError
from compress.layers.linear import replace_linear
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS


def test_a_file_takes_its_place_when_it_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with files.atomic(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [child.name for child in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full; finished blocks are kept"),
        (OSError(errno.EFBIG, "File too large"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full"),
        (SafetensorError("I/O error: File too large (os error 27)"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied"), r"cannot be written \(.*Permission denied\)"),
    ],
)
def test_what_failed_leaves_the_old_file_and_no_part(error, message, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(SaveError, match=message) as caught, files.atomic(path) as part:
        part.write_text("half")
        raise error
    assert caught.value.exit_code == 1 and str(path) in str(caught.value)
    assert path.read_text() == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["a.txt"]


def test_an_interrupt_leaves_no_part(tmp_path):
    with pytest.raises(KeyboardInterrupt), files.atomic(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(SaveError, match=r"no/a\.json: cannot be written"):
        files.write_json(tmp_path / "no" / "a.json", {})
    with pytest.raises(SaveError, match=r"no/a\.safetensors: cannot be written"):
        st.write_shard(tmp_path / "no" / "a.safetensors", {"x": torch.zeros(2)})


def test_a_shard_is_written_with_its_digest(tmp_path):
    path = tmp_path / st.shard_name(2, 4)
    assert path.name == "model-00002-of-00004.safetensors"
    digest = st.write_shard(path, {"x": torch.arange(3.0)})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest() == files.file_sha256(path)
    assert torch.equal(load_file(path)["x"], torch.arange(3.0))


def test_a_block_is_stored_under_the_names_of_the_stock_model(tiny):
    model = tiny("gpt2")
    block, stock = model.transformer.h[0], model.transformer.h[0].state_dict()
    dense = replace_linear(block, "attn.c_attn")
    packed = replace_linear(block, "mlp.c_fc")
    codes = quantize(packed.weight, GRIDS["int4"], group_size=16)
    packed.put(codes)
    found = dict(save.block_tensors("h.0", block, FORMATS["compressed-tensors"], torch.bfloat16))
    assert set(found) == {f"h.0.{n}" for n in stock if n != "mlp.c_fc.weight"} | {
        f"h.0.mlp.c_fc.weight_{part}" for part in ("packed", "scale", "shape")
    }
    # The dense one is stored transposed, as Conv1D has it; floats are in the storage dtype.
    assert torch.equal(found["h.0.attn.c_attn.weight"], stock["attn.c_attn.weight"].to(torch.bfloat16))
    assert dense.transposed and all(tensor.is_contiguous() for tensor in found.values())
    assert {str(t.dtype) for t in found.values()} == {"torch.bfloat16", "torch.int32", "torch.int64"}
    dense_form = save.layer_tensors(dense, FORMATS["dense"], torch.float32)
    assert torch.equal(dense_form["bias"], stock["attn.c_attn.bias"])


@pytest.mark.parametrize(("family", "names"), [("llama", 3), ("gpt2", 4), ("qwen2", 3)])
def test_what_is_outside_the_blocks(family, names, tiny, in_memory):
    model = tiny(family)
    found = save.outside_tensors(in_memory(model), {}, FORMATS["native"], torch.float16)
    assert len(found) == names and not any(".0." in name for name in found)
    assert all(torch.equal(t, model.state_dict()[name].to(torch.float16)) for name, t in found.items())


def test_tied_tensors_are_stored_once(tiny, in_memory):
    assert "lm_head.weight" not in save.outside_tensors(in_memory(tiny("gpt2")), {}, FORMATS["native"], torch.float32)
    assert "lm_head.weight" in save.outside_tensors(in_memory(tiny("llama")), {}, FORMATS["native"], torch.float32)


def test_the_names_of_linears_that_stay_dense(tiny, in_memory):
    opened = in_memory(tiny("llama", num_hidden_layers=1))
    compressed = {"model.layers.0.mlp.up_proj"}
    found = save.dense_modules(opened, compressed, [])
    assert "lm_head" in found and "model.layers.0.mlp.up_proj" not in found
    assert len(found) == 7
