"""Files that are written whole or not at all."""

import os

import pytest
import torch

from compress.checkpoint.containers.files import atomic
from compress.checkpoint.containers.safetensors_writing import write_shard
from compress.errors import SaveError


def test_what_is_flushed_is_open_for_writing(tmp_path, monkeypatch):
    """Windows refuses to flush another file, and with it every file that a run writes."""
    flushed = []

    def flush(file):
        os.write(file, b"")  # raises OSError for a file that is open for reading
        flushed.append(file)

    monkeypatch.setattr(os, "fsync", flush)
    with atomic(tmp_path / "a") as part:
        part.write_bytes(b"text")
    assert len(flushed) == 1 and (tmp_path / "a").read_bytes() == b"text"


def test_an_error_leaves_the_old_file(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(SaveError, match="the same command resumes"), atomic(tmp_path / "a") as part:
        part.write_bytes(b"new")
        raise PermissionError(13, "no")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_weights_have_the_permissions_of_any_new_file(tmp_path, umask):
    """safetensors writes files that only their owner can read, so a server of another user could not."""
    before = os.umask(umask)
    try:
        (tmp_path / "text").write_text("")
        write_shard(tmp_path / "a.safetensors", {"x": torch.ones(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "text").stat().st_mode
