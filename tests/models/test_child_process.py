"""A child process imports nothing from the working directory, whatever lies in it."""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from compress.models.child_process import run_function, start_function

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


REPORTER = """
import json, os, sys
def told():
    return json.dumps([os.getcwd(), os.listdir(), sys.path, sys.flags.no_user_site])
def write(path):
    path.write_text(told())
def answer():
    sys.stdin.readline()
    print(told(), flush=True)
"""


@pytest.fixture(params=["run_function", "start_function"])
def reported(request, trap, tmp_path, monkeypatch):
    """reported(): the working directory of a child process, its files, its path, and whether the user's packages are
    left out."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "reporter_of_places.py").write_text(REPORTER)
    monkeypatch.chdir(trap)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", str(tmp_path / "lib")]))
    (tmp_path / "empty").mkdir()
    reporter = import_module("reporter_of_places")

    def report():
        if request.param == "run_function":
            done = run_function(reporter.write, tmp_path / "told.json")
            assert done.returncode == 0, done.stderr
            return json.loads((tmp_path / "told.json").read_text())
        process = start_function(reporter.answer, str(tmp_path / "empty"))
        written, errors = process.communicate("\n")
        assert process.returncode == 0, errors
        return json.loads(written)

    yield report
    sys.modules.pop("reporter_of_places")


def test_a_child_works_in_an_empty_folder_and_imports_from_absolute_places(reported, trap, tmp_path):
    """Each is enough alone, so each is looked at."""
    folder, inside, path, _ = reported()
    assert Path(folder) != trap and inside == []
    assert str(tmp_path / "lib") in path
    assert all(os.path.isabs(entry) and not Path(entry).is_relative_to(trap) for entry in path)
    assert folder not in path


def test_a_child_leaves_out_the_users_packages_as_its_parent_does(reported, monkeypatch):
    for left_out in (0, 1):
        flags = SimpleNamespace(isolated=0, ignore_environment=0, no_user_site=left_out)
        parent = SimpleNamespace(flags=flags, executable=sys.executable)
        monkeypatch.setattr("compress.models.child_process.sys", parent)
        assert reported()[3] == left_out


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
