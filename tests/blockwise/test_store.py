"""The activation store: in memory up to its limit, the rest in files; what is put in comes out."""

import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from compress.blockwise.store import ActivationStore
from compress.errors import SaveError

ROW = 40  # bytes of a tensor of 10 floats


def tensor(seed: int, size: int = 10, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_beyond_the_limit_tensors_are_in_files(tmp_path):
    store = ActivationStore(3 * ROW, tmp_path / "spill")
    for seed in range(5):
        store.append(tensor(seed))
    assert len(store) == 5 and store.in_files == 2
    assert len(list((tmp_path / "spill").glob("*/*.safetensors"))) == 2
    for seed, found in enumerate(store):
        assert torch.equal(found, tensor(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_shape_and_dtype_survive(dtype, tmp_path):
    strided = tensor(0, 24, dtype).reshape(4, 6).T  # not contiguous
    store = ActivationStore(0, tmp_path)
    store.append(strided)
    assert store.in_files == 1
    assert store[0].dtype == dtype and torch.equal(store[0], strided)


def test_a_tensor_can_take_the_place_of_itself(tmp_path):
    """What is read may be a view of the file that is about to be written."""
    store = ActivationStore(0, tmp_path)
    store.append(tensor(0, 100_000))
    for _ in range(3):
        store[0] = store[0]
        assert torch.equal(store[0], tensor(0, 100_000))


def test_what_was_read_stays_when_its_place_is_taken(tmp_path):
    store = ActivationStore(0, tmp_path)
    store.append(tensor(0, 100_000))
    read = store[0]
    store[0] = tensor(1, 100_000)
    assert torch.equal(read, tensor(0, 100_000)) and torch.equal(store[0], tensor(1, 100_000))


def test_room_that_becomes_free_is_used_and_its_file_goes(tmp_path):
    store = ActivationStore(ROW, tmp_path)
    store.append(tensor(0))
    store.append(tensor(1))
    store[0] = tensor(2, 1)
    assert store.in_files == 1
    store[1] = tensor(3, 5)
    assert store.in_files == 0 and list(tmp_path.glob("*/*")) == []
    assert torch.equal(store[0], tensor(2, 1)) and torch.equal(store[1], tensor(3, 5))


@given(st.integers(0, 6 * ROW), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=20))
def test_it_is_a_list_and_keeps_to_its_limit(limit, writes):
    with TemporaryDirectory() as folder:
        check_against_a_list(ActivationStore(limit, Path(folder)), Path(folder), limit, writes)


def check_against_a_list(store, folder, limit, writes):
    plain = [tensor(i) for i in range(5)]
    for item in plain:
        store.append(item)
    for seed, (index, size) in enumerate(writes):
        plain[index] = tensor(seed + 5, size)
        store[index] = plain[index]
        in_files = sum(load_file(path)["x"].numel() for path in folder.glob("*/*.safetensors"))
        assert 4 * (sum(item.numel() for item in plain) - in_files) <= limit
    assert all(torch.equal(found, wanted) for found, wanted in zip(store, plain, strict=True))


@pytest.mark.parametrize("within", [True, False])
def test_its_files_go_with_it(within, tmp_path, monkeypatch):
    """They are in the folder that is asked for, or in the system's for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "system"))
    (tmp_path / "system").mkdir()
    store = ActivationStore(0, tmp_path / "own" if within else None)
    store.append(tensor(0))
    (folder,) = tmp_path.glob("*/*")
    assert folder.parent.name == ("own" if within else "system") and list(folder.iterdir())
    del store
    assert not folder.exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    store = ActivationStore(0, tmp_path / "file")
    with pytest.raises(SaveError, match="activations .*cannot be written"):
        store.append(tensor(0))
