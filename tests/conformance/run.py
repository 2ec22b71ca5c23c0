"""Owners read what compress writes, and compress reads what they write: a table of results (`make conformance`).

Each owner has a virtual environment of its own in the cache folder. It sees the packages of this environment (torch,
transformers) and adds the owner's, without their pinned dependencies. Checkpoints are made of the pico model of the
tests, or of the models given by --model. The result of each row: the greatest difference of dequantized weights, 0 for
bit-equal ones, and of logits relative to the largest logit, which must be below the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import compress
from compress.errors import CompressError
from compress.model.linear import CompressedLinear

HERE = Path(__file__).parent
PICO = HERE.parent / "pico" / "model"
TOLERANCE = {"float16": 2e-2, "float32": 1e-4}
"""Of logits, relative to the largest: kernels add up products of 16 bits in another order."""
OF_BFLOAT16 = 2e-2  # bitsandbytes multiplies 4-bit weights in bfloat16 on CPUs with AVX-512
OF_INPUTS = 5e-2  # LLM.int8: bitsandbytes rounds inputs to 127 steps per sign, compressed-tensors and we to 127.5
TOKENS, MINUTES = 48, 20


@dataclass(frozen=True)
class Owner:
    """A program that owns a format. packages: of its environment. script: of the reader."""

    name: str
    packages: tuple[str, ...]
    reader: str = "transformers"
    dtype: str = "float32"


GPTQMODEL = Owner(
    "gptqmodel",
    ("logbar", "device-smi", "tokenicer", "threadpoolctl", "pypcre", "defuser", "pillow", "optimum", "gptqmodel"),
    "gptqmodel",
    "float16",
)
BITSANDBYTES = Owner("bitsandbytes", ("bitsandbytes",))
COMPRESSED_TENSORS = Owner("compressed-tensors", ("compressed-tensors",))
OWNERS = {owner.name: owner for owner in (COMPRESSED_TENSORS, GPTQMODEL, BITSANDBYTES)}
"""Another owner, such as one of GGUF, is one more entry here and a script in `readers/`."""


@dataclass(frozen=True)
class Case:
    """A checkpoint that compress writes. step: the pass, as a recipe spells it. tolerance: None: that of the dtype."""

    format: str
    owner: Owner
    step: dict[str, dict[str, object]]
    label: str
    tolerance: float | None = None


def cases() -> Iterator[Case]:
    """Every grid, group size, with and without zero points and act-order."""
    for bits in (2, 3, 4, 8):
        for size in (32, "channel"):
            for symmetric in (True, False):
                kind = "sym" if symmetric else "asym"
                options = {"weights": f"int{bits}", "group_size": size, "symmetric": symmetric}
                yield Case("gptq", GPTQMODEL, {"rtn": options}, f"int{bits} {size} {kind}")
                if bits == 4:
                    yield Case("awq", GPTQMODEL, {"rtn": options}, f"int{bits} {size} {kind}")
                if bits in (4, 8):
                    yield Case("compressed-tensors", COMPRESSED_TENSORS, {"rtn": options}, f"int{bits} {size} {kind}")
        ordered = {"weights": f"int{bits}", "group_size": 32, "act_order": "group"}
        yield Case("gptq", GPTQMODEL, {"gptq": ordered}, f"int{bits} 32 sym act-order")
    for grid in ("nf4", "nf4_bnb_dq", "fp4_bnb", "fp4_bnb_dq"):
        yield Case(
            "bitsandbytes", BITSANDBYTES, {"rtn": {"weights": grid, "group_size": 32}}, f"{grid} 32", OF_BFLOAT16
        )
    yield Case("bitsandbytes", BITSANDBYTES, {"llm_int8": {}}, "int8 channel", OF_INPUTS)


WRITTEN = {
    "bitsandbytes": ("int8", "nf4", "fp4", "nf4-dq", "fp4-dq"),
    "gptqmodel": ("4-32-sym-plain", "4-32-sym-desc", "4-32-asym-plain", "8-32-sym-plain"),
}
"""The checkpoints that owners write, by the kinds of their scripts in `writers/`."""


def environment(owner: Owner, cache: Path) -> Path:
    """The Python of an owner's environment; made on first use. Raises CalledProcessError if it does not install."""
    folder = cache / owner.name
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if ready.exists() and ready.read_text() == " ".join(owner.packages):
        return python
    venv.create(folder, with_pip=False, clear=True)
    inside = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (inside / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    for package in owner.packages:
        subprocess.run([*install, "--no-build-isolation", package], check=True, timeout=60 * MINUTES)
    ready.write_text(" ".join(owner.packages))
    return python


def run_jobs(python: Path, path: Path, jobs: list[dict[str, str]], work: Path) -> None:
    """Run a script of an owner on some jobs, without a network. Raises RuntimeError with its last lines."""
    listed = work / f"{path.parent.name}-{path.stem}.json"
    listed.write_text(json.dumps(jobs))
    code = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run([python, path, listed], capture_output=True, text=True, timeout=60 * MINUTES, env=code)
    if done.returncode:
        raise RuntimeError(" / ".join(done.stderr.strip().splitlines()[-2:]))


def answered(job: dict[str, str]) -> dict[str, torch.Tensor]:
    """The tensors that a script wrote for a job. Raises RuntimeError with its error."""
    failed = Path(job["out"] + ".error")
    if failed.exists():
        raise RuntimeError(failed.read_text())
    return load_file(job["out"])


def ours(folder: Path, ids: torch.Tensor, dtype: str) -> tuple[torch.Tensor, dict[str, CompressedLinear]]:
    """Logits and compressed layers as `compress.load` has them."""
    model, _ = compress.load(folder, dtype)
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()
    return logits, {name: module for name, module in model.named_modules() if isinstance(module, CompressedLinear)}


def compare(case: Case, folder: Path, found: dict[str, torch.Tensor], ids: torch.Tensor) -> tuple[str, str, bool]:
    """(weights, logits, agreement) of a reader."""
    dtype = case.owner.dtype
    logits, layers = ours(folder, ids, dtype)
    worst, counted = 0.0, 0
    for name, layer in layers.items():
        if f"{name}.weight" in found:
            theirs = found[f"{name}.weight"]
            mine = layer.weight_as(theirs.dtype)
            gap = (theirs.float() - mine.float()).abs().max() / mine.float().abs().max()
            worst, counted = max(worst, float(gap)), counted + 1
    difference = float((found["logits"] - logits).abs().max() / logits.abs().max())
    exact = 1e-6 if case.step.keys() == {"llm_int8"} else 0.0  # the int8 reader multiplies by 1/127, we divide by 127
    agrees = worst <= exact and difference <= (case.tolerance or TOLERANCE[dtype])
    weights = "not exposed" if not counted else "bit-equal" if worst == 0 else f"{worst:.1e}"
    return weights, f"{difference:.1e}", agrees and (counted in (0, len(layers)))


def write(case: Case, source: Path, folder: Path) -> None:
    """Compress a model and save it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from compress.recipe.schema import read_passes

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
    compress.apply(model, read_passes([case.step]), calibration=ids)
    compress.save(model, folder, case.format, AutoTokenizer.from_pretrained(source))


def read_rows(name: str, source: Path, work: Path, owner: Owner, cache: Path) -> Iterator[tuple[str, ...]]:
    """The rows of checkpoints that compress writes and the owner reads."""
    found = [case for case in cases() if case.owner is owner]
    jobs = [
        {key: str(work / f"{name}-{owner.name}-{i}{end}") for key, end in (("folder", ""), ("out", ".safetensors"))}
        | {"ids": str(work / f"{name}.ids")}
        for i, _ in enumerate(found)
    ]
    reason = ""
    try:
        python = environment(owner, cache)
        for case, job in zip(found, jobs, strict=True):
            write(case, source, Path(job["folder"]))
        run_jobs(python, HERE / "readers" / f"with_{owner.reader}.py", jobs, work)
    except (RuntimeError, subprocess.SubprocessError, CompressError) as error:
        reason = str(error)
    for case, job in zip(found, jobs, strict=True):
        head = name, f"{case.format} {case.label}", f"{owner.name} reads"
        try:
            if reason:
                raise RuntimeError(reason)
            weights, logits, agrees = compare(case, Path(job["folder"]), answered(job), load_file(job["ids"])["ids"])
            yield (*head, weights, logits, "agrees" if agrees else "DIFFERS")
        except RuntimeError as error:
            yield (*head, "", "", " ".join(f"FAILED: {error}".split())[:200])


def write_rows(name: str, source: Path, work: Path, owner: Owner, cache: Path) -> Iterator[tuple[str, ...]]:
    """The rows of checkpoints that the owner writes and compress reads."""
    kinds = WRITTEN.get(owner.name, ())
    stems = [work / f"{name}-{owner.name}-{kind}" for kind in kinds]
    jobs = [
        {"source": str(source), "folder": str(stem), "ids": str(work / f"{name}.ids"), "out": f"{stem}.safetensors",
         "kind": kind}
        for stem, kind in zip(stems, kinds, strict=True)
    ]  # fmt: skip
    reason = ""
    try:
        if jobs:
            run_jobs(environment(owner, cache), HERE / "writers" / f"with_{owner.name}.py", jobs, work)
    except (RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error)
    for job in jobs:
        head = name, f"{owner.name} {job['kind']}", "compress reads"
        try:
            if reason:
                raise RuntimeError(reason)
            theirs = answered(job)["logits"]
            logits, layers = ours(Path(job["folder"]), load_file(job["ids"])["ids"], owner.dtype)
            difference = float((logits - theirs).abs().max() / theirs.abs().max())
            limit = OF_INPUTS if job["kind"] == "int8" else OF_BFLOAT16  # GPTQModel computes in float16
            agrees = layers and difference <= limit
            yield (*head, f"{len(layers)} layers", f"{difference:.1e}", "agrees" if agrees else "DIFFERS")
        except (RuntimeError, CompressError) as error:
            yield (*head, "", "", " ".join(f"FAILED: {error}".split())[:200])


def main() -> int:
    """Print the table; 1 if an owner and compress differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "compress-conformance")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for checkpoints")
    parser.add_argument("--model", type=Path, action="append", help="a folder with a dense model; repeatable")
    parser.add_argument("--owner", action="append", choices=list(OWNERS), help="only this owner; repeatable")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    chosen, bad = set(asked.owner or OWNERS), 0
    print(
        "| model | checkpoint | reader | weights | logits | result |\n| --- | --- | --- | --- | --- | --- |", flush=True
    )
    for source in asked.model or [PICO]:
        name = "pico" if source == PICO else source.name
        save_file({"ids": torch.randint(0, 1000, (1, TOKENS))}, asked.work / f"{name}.ids")
        for rows, owner in [(rows, OWNERS[one]) for one in OWNERS if one in chosen for rows in (read_rows, write_rows)]:
            for row in rows(name, source, asked.work, owner, asked.cache):
                bad += "DIFFERS" in row[-1] or "FAILED" in row[-1]
                print(f"| {' | '.join(row)} |", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
