"""The instruction sets: which of them a processor gets, how one is forced, and how they are built and checked."""

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from products import SETS

from compress.errors import RecipeError
from compress.native import library as module
from compress.native.library import built, instruction_set, library

ROOT = Path(__file__).parents[2]
CPUINFO = Path("/proc/cpuinfo")
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
NEEDS = {  # names of Linux for what the processor must have, the best set first
    "x86_64": {"amx_bf16": AMX, "avx512_bf16": AVX512 | {"avx512_bf16"}, "avx512": AVX512, "avx2": {"avx2", "fma"}},
    "aarch64": {"neon_bf16": {"asimddp", "bf16"}, "neon_dotprod": {"asimddp"}, "neon": {"asimd"}},
}
FOREIGN = {"x86_64": "neon", "AMD64": "neon"}.get(platform.machine(), "avx2")


def gives_tile_registers():
    """Whether the system lets this process use the tile registers of Intel AMX; sandboxes may not."""
    arch_prctl, ask, tile_data = 158, 0x1023, 18  # numbers of x86-64
    return platform.machine() == "x86_64" and ctypes.CDLL(None).syscall(arch_prctl, ask, tile_data) == 0


@pytest.mark.skipif(not SETS, reason="the kernels were not built")
@pytest.mark.skipif(not CPUINFO.exists() or platform.machine() not in NEEDS, reason="no list of the system's")
def test_the_sets_are_those_that_the_processor_has():
    text = CPUINFO.read_text()
    line = next(line for line in text.splitlines() if line.startswith(("flags", "Features")))
    has = set(line.split(":")[1].split())
    if not gives_tile_registers():
        has -= {"amx_tile"}
    expected = [name for name, needs in NEEDS[platform.machine()].items() if needs <= has]
    if "GenuineIntel" in text and "avx512_bf16" in expected:  # slower there
        expected.remove("avx512_bf16")
        expected.insert(expected.index("avx512") + 1, "avx512_bf16")
    assert [*expected, "generic"] == SETS


class Machine:
    """A library with the sets of another machine, which notes the ones that are asked for."""

    def __init__(self, sets):
        self.used = []
        self.compress_instruction_sets = lambda: sets.encode()
        self.compress_use = lambda name: self.used.append(name.decode()) or -(name.decode() not in sets.split(","))

    def __getattr__(self, name):
        self.__dict__[name] = function = lambda *inputs: 0
        return function


@pytest.fixture
def machine(monkeypatch):
    """Makes the library that of a machine with the given sets, and COMPRESS_KERNELS what it should be."""

    def of(sets, expected=""):
        actual = Machine(sets)
        monkeypatch.setattr(ctypes, "CDLL", lambda path: actual)
        monkeypatch.setattr(module, "built", lambda: "_native.so")
        monkeypatch.setenv("COMPRESS_KERNELS", expected)
        library.cache_clear()
        return actual

    yield of
    monkeypatch.undo()
    library.cache_clear()


ARM = "neon_bf16,neon_dotprod,neon,generic"


@pytest.mark.parametrize(
    ("sets", "wanted", "used"),
    [
        (ARM, "", "neon_bf16"),
        (ARM, "neon", "neon"),
        (ARM, "neon_dotprod", "neon_dotprod"),
        ("neon,generic", "", "neon"),
        ("avx2,generic", "generic", "generic"),
    ],
)
def test_the_best_set_or_the_one_that_is_asked_for(machine, sets, wanted, used):
    actual = machine(sets, wanted)
    assert instruction_set() == used
    assert actual.used == ([wanted] if wanted else [])


@pytest.mark.parametrize(
    ("sets", "wanted", "known"),
    [
        ("avx2,generic", "neon", "avx2, generic"),
        ("neon,generic", "neon_dotprod", "neon, generic"),
        (ARM, "avx2", "neon_bf16, neon_dotprod, neon, generic"),
    ],
)
def test_a_set_that_the_machine_does_not_have(machine, sets, wanted, known):
    machine(sets, wanted)
    message = f"^COMPRESS_KERNELS={wanted} is not available here; use one of {known}, or none$"
    with pytest.raises(RecipeError, match=message):
        library()


@pytest.mark.skipif(not SETS, reason="the kernels were not built")
def test_the_sets_of_another_processor_are_not_in_the_library(monkeypatch):
    monkeypatch.setenv("COMPRESS_KERNELS", FOREIGN)
    library.cache_clear()
    try:
        known_values = ", ".join(SETS)
        with pytest.raises(RecipeError, match=f"={FOREIGN} is not available here; use one of {known_values}, or none"):
            library()
    finally:
        monkeypatch.undo()
        library.cache_clear()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("variable", ["CROSS_CXX", "QEMU"])
def test_what_the_check_in_an_emulator_needs(variable):
    tools = {"CROSS_CXX": "sh", "QEMU": "sh"} | {variable: "a-tool-that-nobody-has"}
    completed = subprocess.run(
        ["make", "-C", ROOT, "test-neon", *(f"{name}={tool}" for name, tool in tools.items())],
        capture_output=True,
        text=True,
    )
    assert completed.returncode != 0
    needs = "cmake" if shutil.which("cmake") is None else "a-tool-that-nobody-has"
    assert f"make test-neon needs {needs}, which is not there; on Debian: apt-get install" in completed.stderr


def configured(folder, *options, **environment):
    """What CMake prints when it prepares a build."""
    command = ["cmake", "-S", ROOT, "-B", folder, *options]
    completed = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def compiler(folder, name, refuses):
    """A script that runs a compiler, but does not know some flags."""
    path = folder / "c++"
    lines = [f'case " $* " in *" {flag} "*) echo "unknown option {flag}" >&2; exit 1;; esac' for flag in refuses]
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {name} "$@"', ""]))
    path.chmod(0o755)
    return f"-DCMAKE_CXX_COMPILER={path}"


MISSING = shutil.which("cmake") is None or shutil.which("g++") is None
NEEDS_CMAKE = pytest.mark.skipif(MISSING, reason="cmake or g++ is missing")


@pytest.mark.slow
@NEEDS_CMAKE
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
def test_a_set_is_left_out_where_the_compiler_does_not_know_its_flags(tmp_path):
    printed = configured(tmp_path / "build", compiler(tmp_path, "g++", ["-mavx512bf16", "-mavx2"]))
    for name in ("amx_bf16", "avx512_bf16", "avx2"):
        assert f"Kernels for {name} are left out: the compiler does not know -mavx" in printed
    assert "avx512 are left out" not in printed
    objects = (tmp_path / "build/CMakeFiles/native.dir/build.make").read_text()
    names = ("avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "generic")
    assert [name for name in names if f"/{name}.cpp.o" in objects] == ["avx512", "generic"]


@pytest.mark.slow
@NEEDS_CMAKE
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="there is no compiler for AArch64")
def test_the_sets_of_aarch64_are_compiled_for_it_alone(tmp_path):
    """As the compiler makes code for it, not as the machine is that compiles; x86 sets are not."""
    only = compiler(tmp_path, "aarch64-linux-gnu-g++", ["-march=armv8.2-a+dotprod+bf16"])
    printed = configured(tmp_path / "build", only)
    assert "Kernels for neon_bf16 are left out: the compiler does not know -march=armv8.2-a+dotprod+bf16" in printed
    objects = (tmp_path / "build/CMakeFiles/native.dir/build.make").read_text()
    names = ("avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "neon_dotprod", "neon_bf16", "generic")
    assert [name for name in names if f"/{name}.cpp.o" in objects] == ["neon", "neon_dotprod", "generic"]


@pytest.mark.slow
@NEEDS_CMAKE
@pytest.mark.skipif(not SETS, reason="the kernels were not built")
def test_every_entry_point_and_set_of_this_machine(tmp_path):
    """The program that `make test-neon` runs in an emulator: buffers that end where memory ends, and the bits of any threads."""
    program, sources = tmp_path / "check_kernels", ROOT / "compress/native/src"
    subprocess.run(
        [
            "g++",
            "-std=c++17",
            "-O1",
            f"-I{sources}",
            ROOT / "tests/kernels/cross/check.cpp",
            "-o",
            program,
            "-pthread",
            "-ldl",
        ],
        check=True,
    )
    completed = subprocess.run([program, built(), ",".join(SETS)], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.endswith("outputs compared, 0 failures\n")
