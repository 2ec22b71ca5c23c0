"""Every script of eval/benchmarks runs, in the smallest form that its options allow, on the pico model."""

import io
import json
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compress
from compress import RTN
from compress.native.library import available

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "eval" / "benchmarks"
PROTOCOL = "--model {pico} --test {test} --calibration {calibration}"
LITTLE = "--windows 1 --length 32"
TINY_LLAMA = (
    "--layers 1 --hidden 32 --intermediate 32 --heads 1 --kv-heads 1 --vocabulary 64 --large-sequences 2 "
    "--large-length 16 --large-batch 2 --large-group 32 --plain"
)

RUNS = {
    "attention": "--threads 1 --shape 2x1x8x32 --rounds 1",
    "baselines": "rtn",
    "cache_dtype": "{packed} --test {test} --windows 1 --length 4",
    "convert": "{pico} {new}",
    "divergence": "{rtn} --groups 32 " + PROTOCOL,
    "estimated_divergence": "{pico} {packed} --ids {test} " + LITTLE,
    "families": "--only llama --passes rtn",
    "gpu_passes": "codes large --device cpu --recipes wanda --sequences 2 --group 32 "
    + LITTLE
    + " "
    + TINY_LLAMA
    + " --model {pico} --test {test} --calibration {calibration}",
    "kinds": "{pico} --only 'int8, rtn' --windows 2 --length 32",
    "loops": "--rounds 1 --shape 64x64 --code 3inst 1",
    "mutations": "--check",
    "notebooks": "{notebook} --folder {folder}",
    "paired": "{rtn} --windows 1 --sequences 2 --length 32 " + PROTOCOL,
    "peer_transformers": "load {packed} float32",
    "quality": "--one {rtn} --also embedded " + PROTOCOL,
    "roofline": "{packed} --turns 1 --context 17",
    "plan_table": "Llama-3.1-8B",
    "rows": "--list",
    "speed": "{packed} --model {pico} --test {test} --windows 1 --rounds 1",
    "time_model": "--reference --passes rtn --widths 64 --depths 1",
    "wheels": "--help",  # downloads every dependency; tests/test_wheels.py has its parts
}
"""Scripts that run in this process, with their arguments."""

SLOW = {
    "drop_experts": "--steps 2 --windows 2 --seeds 1",
    "experts": "--steps 2 --windows 2 --sequences 2",
    "evaluation": "{pico} --data {folder} --tasks '' --text {text} --limit 1 --rounds 1",
    "fuzz": "--inputs 2",
    "kernels": "--threads 1 --shape 64x64 --grid int4 --batch 1",
    "memory": "rtn --planned --blocks 1 --hidden 64 --sequences 2 --processes 2",
    "ranks": "{pico} {calibration} {test} wanda",
    "rows": "rtn-int8 " + PROTOCOL,
    "runtimes": "{pico} --threads 1 --rounds 1",
    "startup": "--repeat 1",
    "wide": "llama-3-8b --folder {folder} --divide 64 --passes rtn --sequences 2 --length 16 --threads 1",
}
"""Scripts that start other processes, which import torch anew, or compile."""

COMPILED = ("attention",)
"""Scripts of `RUNS` that measure the compiled kernels alone."""

REFUSED = {
    "peer_llamacpp": ("measure {pico} {test} {pico}", "llama-cpp-python is not installed here"),
    "peer_vllm": ("{pico} float32", "vLLM is not installed here"),
    "peer_mlx": ("{pico}", "mlx-lm is not installed here"),
    "peer_llmcompressor": ("gptq " + PROTOCOL, "needs llmcompressor"),
    "peer_wide": ("gptq --model {folder} --sequences 1 --threads 1", "needs llmcompressor"),
    "versus_llmcompressor": (
        "{rtn} --method gptq --peer-python {python} " + PROTOCOL,
        "needs a Python with llmcompressor",
    ),
    "versus_llamacpp": ("{pico} {calibration} {test} --work {new}", "llama-cpp-python is not installed here"),
}
"""Scripts that need packages which are not installed, up to the error that says so."""

ELSEWHERE = {
    "gpu_kernels": "tests/test_benchmarks.py",
    "kills": "tests/pipeline/test_kill_benchmark.py",
    "larger_than_memory": "tests/pipeline/test_larger_than_memory.py",
}
"""Scripts with a test of their own."""

MODULES = {"peer_kernels": "kernels", "random_llama": "gpu_passes"}
"""Modules that are no scripts, and a script that imports them."""


@pytest.fixture(scope="module")
def packed(pico, tmp_path_factory) -> str:
    """A packed checkpoint of the pico model."""
    folder = tmp_path_factory.mktemp("packed") / "int8"
    recipe = compress.Recipe(model=pico, passes=(RTN(weights="int8", group_size=32),), eval=None)
    compress.run(recipe, folder, progress=False)
    return str(folder)


@pytest.fixture
def script(request, pico, texts, tmp_path, monkeypatch, capsys):
    """script(name, arguments) -> what it prints; `main` runs in this process, whose modules and path stay."""

    def run(name: str, arguments: str) -> str:
        places = {"pico": pico, **texts, "new": tmp_path / "new", "folder": tmp_path, "python": sys.executable}
        places |= {"rtn": tmp_path / "rtn.yaml", "notebook": tmp_path / "one.ipynb", "text": tmp_path / "text.txt"}
        places["rtn"].write_text("model: m\npasses: [rtn: {weights: int8, group_size: 32}]\n")
        cell = {"cell_type": "code", "metadata": {}, "source": ["6 * 7"], "outputs": [], "execution_count": None}
        places["notebook"].write_text(json.dumps({"cells": [cell]}))
        places["text"].write_text("One sentence after the other makes a paragraph. " * 10)
        if "{packed}" in arguments:
            places["packed"] = request.getfixturevalue("packed")
        path = FOLDER / f"{name}.py"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), *(word.format(**places) for word in shlex.split(arguments))])
        monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
        monkeypatch.setattr(sys, "stdin", io.StringIO("decode 4\n"))
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    def finished(name: str, arguments: str) -> str:
        try:
            return run(name, arguments)
        except SystemExit as done:
            if done.code:
                raise
            return capsys.readouterr().out

    return finished


def check(printed: str) -> None:
    """Something was printed, and lines of JSON are JSON."""
    lines = printed.splitlines()
    assert lines
    for line in lines:
        if line.startswith("{"):
            json.loads(line)


@pytest.mark.parametrize("name", RUNS)
def test_a_script_runs(name, script):
    if name in COMPILED and not available():
        with pytest.raises(SystemExit, match="needs the kernels"):
            script(name, RUNS[name])
        return
    check(script(name, RUNS[name]))


@pytest.mark.few(0, slow=4)
@pytest.mark.parametrize("name", SLOW)
def test_a_script_of_several_processes_runs(name, script):
    check(script(name, SLOW[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_without_its_packages_says_so(name, script):
    arguments, message = REFUSED[name]
    with pytest.raises(SystemExit, match=message):
        script(name, arguments)


def test_the_benchmark_of_gpu_kernels_needs_a_gpu(script):
    arguments = "--shape 256x256 --scheme W4A16 --batch 1"
    if torch.cuda.is_available():
        check(script("gpu_kernels", arguments))
        return
    with pytest.raises(SystemExit, match="needs a GPU"):
        script("gpu_kernels", arguments)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_program_of_tiles_compiles():
    command = ["c++", "-std=c++17", "-march=native", "-fsyntax-only", "-I", "compress/native/src"]
    subprocess.run([*command, FOLDER / "tiles.cpp"], check=True, cwd=ROOT)


def test_every_script_is_tested():
    """A new script needs a line in RUNS or SLOW; `ceilings.cpp` is compiled by `kernels`."""
    tested = {*RUNS, *SLOW, *REFUSED, *ELSEWHERE, *MODULES}
    assert {path.stem for path in FOLDER.glob("*.py")} == tested
    assert {path.name for path in FOLDER.glob("*.cpp")} == {"ceilings.cpp", "tiles.cpp"}
    for name, file in ELSEWHERE.items():
        assert name in (ROOT / file).read_text(encoding="utf-8")
    for module, importer in MODULES.items():
        assert f"import {module}\n" in (FOLDER / f"{importer}.py").read_text(encoding="utf-8")
