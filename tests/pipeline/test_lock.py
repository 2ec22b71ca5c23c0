"""One run at a time works in a folder: the second is told of the first, and a killed one leaves no lock."""

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

import compress
from compress.checkpoint.containers.digests import WORK
from compress.errors import OutputError
from compress.passes.contract.journal import Journal
from compress.pipeline.lock import LOCK, locked

HOLD = """
import sys, time
from pathlib import Path
from compress.passes.contract.journal import Journal
from compress.pipeline.lock import locked
with locked(Path(sys.argv[1]), Journal()):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path / 'out'."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_second_run_is_told_of_the_first_until_that_is_killed(holder, recipe, tmp_path):
    asked, out = recipe(compress.RTN(weights="int4", group_size=32), eval=None), tmp_path / "out"
    since = r"since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"
    wanted = f"out: process {holder.pid} on {re.escape(socket.gethostname())}, {since}, works in this folder; wait"
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=wanted):
            compress.run(asked, out, overwrite, progress=False)
    assert [path.name for path in out.iterdir()] == [WORK]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (out / WORK / LOCK).exists()
    compress.run(asked, out, progress=False)
    assert (out / "report.json").exists()


def test_the_lock_outlives_what_overwrite_removes(recipe, tmp_path):
    seen = []

    def listener(entry):
        if entry.kind == "block" and not seen:
            with pytest.raises(OutputError, match=f"process {os.getpid()} on .* works in this folder"):
                compress.run(first, tmp_path, progress=False)
            seen.append(entry)

    first, second = (recipe(compress.RTN(weights=grid, group_size=32), eval=None) for grid in ("int4", "int8"))
    compress.run(first, tmp_path, progress=False)
    compress.run(second, tmp_path, overwrite=True, journal=Journal(listeners=[listener]), progress=False)
    assert seen


def test_a_lock_that_is_taken_but_not_yet_signed(tmp_path):
    with locked(tmp_path, Journal()):
        (tmp_path / WORK / LOCK).write_text("")
        with pytest.raises(OutputError, match="another process works in this folder"), locked(tmp_path, Journal()):
            pass


def test_a_run_whose_folder_was_deleted_leaves_the_lock_of_another(tmp_path):
    with locked(tmp_path / "out", Journal()):
        shutil.rmtree(tmp_path / "out")
        other = locked(tmp_path / "out", Journal())
        other.__enter__()
    assert (tmp_path / "out" / WORK / LOCK).exists()
    other.__exit__(None, None, None)
    assert not (tmp_path / "out").exists()


def test_the_error_is_of_the_folder_if_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"), locked(tmp_path / "file" / "out", Journal()):
        pass


@pytest.mark.parametrize("number", [errno.EACCES, errno.EDEADLK, errno.ENOLCK])
def test_windows_locks_one_byte_behind_the_text(number, tmp_path, monkeypatch):
    calls = []

    def locking(file, mode, size):
        calls.append((os.lseek(file, 0, os.SEEK_CUR), mode, size))
        if len(calls) > 1:
            raise OSError(number, "no")

    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK=2))
    monkeypatch.setattr("compress.pipeline.lock.os", types.SimpleNamespace(**vars(os) | {"name": "nt"}))
    journal = Journal()
    with locked(tmp_path, journal):
        text = (tmp_path / WORK / LOCK).read_text()
        assert json.loads(text)["process"] == os.getpid()
        if number == errno.ENOLCK:
            with locked(tmp_path, journal):
                pass
            assert "the file system has no locks" in journal.entries[0].message
        else:
            with pytest.raises(OutputError, match=f"process {os.getpid()} on"), locked(tmp_path, journal):
                pass
    assert calls == [(1 << 30, 2, 1)] * 2
