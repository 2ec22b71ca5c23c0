"""Tensors of a safetensors file by mapped ranges: the values of safetensors' own reader, and no more than is asked for."""

import json
import os
from struct import pack

import psutil
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from compress.checkpoint.containers.mapped import GAP, MappedTensors, merged
from compress.numerics.dtypes import SAFETENSORS

DTYPES = sorted(SAFETENSORS.values(), key=str)
BIG = 64 << 20


@pytest.fixture
def stored(tmp_path):
    """stored(tensors): the path of a file with them."""

    def write(tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    return write


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_are_those_that_safetensors_reads(stored, dtype):
    values = torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype)
    others = {"odd": torch.ones(3, dtype=torch.uint8), "none": torch.empty(0, 2), "one": values[1, 1].clone()}
    try:
        path = stored({"a": values, **others})
    except KeyError:
        pytest.skip(f"this version of safetensors writes no {dtype}")
    found, wanted = MappedTensors(path).get_tensors(["one", "none", "a"]), load_file(path)
    assert list(found) == ["one", "none", "a"]
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype and tensor.shape == wanted[name].shape
        assert tensor.view(torch.uint8 if tensor.ndim else tensor.dtype).equal(
            wanted[name].view(torch.uint8 if tensor.ndim else tensor.dtype)
        )


def test_a_tensor_that_begins_at_any_byte(tmp_path):
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack("<Q", len(text)) + text + bytes([1, 2, 3]) + pack("<2f", 0.5, -2.0))
    found = MappedTensors(path).get_tensors(["a", "b"])
    assert found["a"].tolist() == [1, 2, 3] and found["b"].tolist() == [0.5, -2.0]


def test_writing_to_a_tensor_leaves_the_file_alone(stored):
    path = stored({"a": torch.ones(5000)})
    before = path.read_bytes()
    changed = MappedTensors(path).get_tensors(["a"])["a"]
    changed.zero_()
    assert path.read_bytes() == before and not changed.any() and MappedTensors(path).get_tensors(["a"])["a"].all()


def test_ranges_close_to_each_other_are_one():
    ranges = {"c": (40 + 2 * GAP, 50 + 2 * GAP), "a": (0, 10), "b": (10 + GAP, 20 + GAP)}
    assert merged(ranges) == [((0, 20 + GAP), ["a", "b"]), ((40 + 2 * GAP, 50 + 2 * GAP), ["c"])]
    assert merged({"inside": (2, 3), "around": (1, 9)}) == [((1, 9), ["around", "inside"])]


@pytest.mark.skipif(not hasattr(psutil.Process().memory_info(), "data"), reason="needs Linux: private writable memory")
def test_only_what_is_asked_for_is_mapped(stored):
    path = stored({"big": torch.zeros(BIG, dtype=torch.uint8), "little": torch.ones(1000)})

    def data():
        return psutil.Process().memory_info().data

    start = data()
    file = MappedTensors(path)
    little = file.get_tensors(["little"])["little"]
    assert data() - start < BIG / 4
    big = file.get_tensors(["big"])["big"]
    assert data() - start > BIG / 2
    del big
    assert data() - start < BIG / 4 and little.all()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the platform has no way to ask")
def test_pages_are_asked_for_by_range(stored, monkeypatch):
    path = stored({"a": torch.zeros(GAP, dtype=torch.uint8), "b": torch.zeros(3 * GAP, dtype=torch.uint8)})
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, first, size, advice: asked.append((first, size, advice)))
    MappedTensors(path).ask(["b"])
    assert asked == [(path.stat().st_size - 3 * GAP, 3 * GAP, os.POSIX_FADV_WILLNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    MappedTensors(path).ask(["b"])  # nothing happens
    assert len(asked) == 1


def test_a_damaged_file_and_an_unknown_dtype(tmp_path, stored, monkeypatch):
    (tmp_path / "short").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(SafetensorError):
        MappedTensors(tmp_path / "short")
    path = stored({"a": torch.ones(2)})
    monkeypatch.delitem(SAFETENSORS, "F32")
    with pytest.raises(SafetensorError, match="a has the dtype F32, which is not supported"):
        MappedTensors(path).get_tensors(["a"])["a"]
