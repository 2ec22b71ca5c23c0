"""A child process imports nothing from the working directory, whatever lies in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compress.models.child_process import run_function

NAMES = (
    "torch",
    "gguf",
    "compress",
    "json",
    "numpy",
    "transformers",
    "safetensors",
    "shutil",
    "pathlib",
    "importlib",
    "runpy",
    "tempfile",
    "sitecustomize",
    "usercustomize",
)


@pytest.fixture
def trap(tmp_path):
    """A folder with modules that write the file `marker` when they are imported, and a .pth file that does."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    code = f"open({str(folder / 'marker')!r}, 'a').write(__name__)\n"
    for name in NAMES:
        (folder / f"{name}.py").write_text(code)
    (folder / "a.pth").write_text(f"import json; {code}")
    return folder


@pytest.mark.parametrize("path", [None, "", ".", f".{os.pathsep}", f"{os.pathsep}../downloads"])
def test_no_module_of_the_working_directory_is_imported(path, trap, tmp_path, monkeypatch):
    monkeypatch.chdir(trap)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "source").write_text("text")
    done = run_function(shutil.copyfile, Path("..", "source"), Path("copied"))
    assert done.returncode == 0, done.stderr
    assert (trap / "copied").read_text() == "text"  # relative paths are those of this process
    assert not (trap / "marker").exists()
    assert not (trap / "__pycache__").exists()


def test_the_trap_catches_a_process_that_imports_from_its_working_directory(trap):
    subprocess.run([sys.executable, "-c", "import gguf"], cwd=trap, check=True)
    assert (trap / "marker").read_text().endswith("gguf")


def test_absolute_entries_of_the_path_stay(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(tmp_path), "here"]))
    (tmp_path / "source").touch()
    assert run_function(shutil.copyfile, tmp_path / "source", tmp_path / "copied").returncode == 0
    assert (tmp_path / "marker").exists()


def test_an_error_is_the_last_line(tmp_path):
    done = run_function(shutil.copyfile, tmp_path / "nothing", tmp_path / "copied")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("FileNotFoundError: ")


COMMAND = "import sys; from compress.cli import main; sys.argv[1:] = {}; main()"


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize(
    "code",
    [
        COMMAND.format(["inspect", "a.gguf"]),
        COMMAND.format(["generate", "a.gguf", "x", "--tokens", "1"]),
        "import compress; compress.load('a.gguf')",
    ],
    ids=["inspect", "generate", "load"],
)
def test_opening_a_file_imports_nothing_beside_it(code, pico, trap, tmp_path):
    """As the command `compress` does: a script in a folder of its own, which is first on the path."""
    pytest.importorskip("gguf")
    from gguf_writing import write_pico

    write_pico(pico, trap / "a.gguf", "F32")
    script = tmp_path / "bin" / "start.py"
    script.parent.mkdir()
    script.write_text(code)
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([sys.executable, script], cwd=trap, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    converted = [*(tmp_path / "cache" / "compress").glob("gguf-*/*/config.json")]
    assert converted or "inspect" in code  # which reads the header alone
    assert not (trap / "marker").exists()
