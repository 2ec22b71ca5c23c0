"""Install the wheel in fresh environments, with the newest and the lowest dependencies, and run it and its tests there.

    python eval/benchmarks/wheels.py --python PATH [PATH ...] [--versions newest lowest] [--folder FOLDER]

The wheel is built once. For each interpreter and each kind of versions a virtual environment is made, in which are
installed, in this order: torch alone (newest: what --torch names, as pip chooses it; lowest: its bound), the wheel with
extras, and pytest with hypothesis. `lowest` pins every direct dependency of pyproject.toml to its lower bound, which
must be a version that exists for that interpreter; it is installed for the first interpreter only, the oldest, and
without compressed-tensors, which itself asks for a newer torch. Then, outside of the repository, with the tests but without the sources:

- `compress run` of the demo's recipe on the pico model (newest: read back by transformers, too), and `compress export` to
  GGUF;
- the tests of PARTS.

Prints a Markdown table with a row per environment, and exits with 1 if anything failed. Environments are removed after
their row (--keep: they stay); each takes 1 to 6 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = {"newest": ("eval", "gguf", "compressed-tensors"), "lowest": ("eval", "gguf")}
TOOLS = ("pytest", "hypothesis")
PARTS = ("tests/test_contract.py", "tests/test_recipes.py", "tests/checkpoint/formats", "tests/layers")
SHOWN = ("torch", "transformers", "accelerate", "safetensors", "numpy", "pydantic")
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


@dataclass(frozen=True)
class Environment:
    """One environment. kind: newest or lowest. pins: requirements that replace those of the wheel."""

    python: Path
    kind: str
    pins: tuple[str, ...]
    folder: Path

    @property
    def own(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def run(self, *arguments: str, where: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run its interpreter, without the repository on the path."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        kept |= {"TOKENIZERS_PARALLELISM": "false"}
        return subprocess.run([self.own, *arguments], cwd=where, env=kept, capture_output=True, text=True)


class FailedError(Exception):
    """A step that failed, with the end of its output."""


def main() -> None:
    arguments = parse()
    place = Path(arguments.folder or tempfile.mkdtemp())
    place.mkdir(parents=True, exist_ok=True)
    wheel = Path(arguments.wheel).resolve() if arguments.wheel else built(place)
    rows = []
    for i, python in enumerate(map(Path, arguments.python)):
        for kind in arguments.versions:
            if kind == "lowest" and i:
                continue
            rows.append(tried(environment(python, kind, place), wheel, place, arguments))
            print(rows[-1], file=sys.stderr, flush=True)
    print("| Python | dependencies | the demo on the pico model | tests | seconds |\n|---|---|---|---|---|")
    print("\n".join(rows))
    if not arguments.folder:
        shutil.rmtree(place)
    sys.exit(any("FAILED" in row for row in rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PATH", help="the oldest one first")
    parser.add_argument("--versions", nargs="+", choices=("newest", "lowest"), default=["newest", "lowest"])
    parser.add_argument("--torch", default="torch", help="what pip installs first for `newest`, such as torch==2.13.0")
    parser.add_argument("--folder", help="of the environments; default: a temporary one")
    parser.add_argument("--wheel", help="a wheel that was built before")
    parser.add_argument("--keep", action="store_true", help="do not remove environments, and use those that are there")
    parser.add_argument("--tests", nargs="+", default=PARTS, help="tests to run, by their paths")
    return parser.parse_args()


def built(place: Path) -> Path:
    """The wheel of the working tree."""
    for old in place.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(ROOT)]
    subprocess.run(command, check=True)
    (found,) = place.glob("*.whl")
    return found


def requirements(extras: Sequence[str]) -> list[Requirement]:
    """The direct dependencies of pyproject.toml, with those of extras and of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    tools = [line for line in optional["dev"] if Requirement(line).name in TOOLS]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra]), *tools]
    return [Requirement(line) for line in lines]


def lowest(wanted: Requirement) -> str:
    """The requirement of exactly the lower bound. Raises ValueError for a dependency without one."""
    bounds = [one.version for one in wanted.specifier if one.operator in (">=", "~=", "==")]
    if len(bounds) != 1:
        raise ValueError(f"{wanted}: has no lower bound; write one in pyproject.toml")
    return f"{wanted.name}=={bounds[0]}"


def environment(python: Path, kind: str, place: Path) -> Environment:
    """What is installed for an interpreter and a kind of versions."""
    found = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    pins = tuple(map(lowest, requirements(EXTRAS[kind]))) if kind == "lowest" else ()
    return Environment(python, kind, pins, place / f"{kind}-{found}")


def tried(one: Environment, wheel: Path, place: Path, arguments: argparse.Namespace) -> str:
    """The row of an environment."""
    begin, told = time.monotonic(), {"demo": "FAILED", "tests": "FAILED"}
    label, versions = one.folder.name.partition("-")[2], one.kind
    try:
        if not (arguments.keep and one.own.exists()):
            install(one, wheel, arguments.torch)
        versions = f"{one.kind}: {installed(one)}"
        with tempfile.TemporaryDirectory(dir=place) as work:
            told["demo"] = demo(one, Path(work))
            told["tests"] = tests(one, Path(work), arguments.tests)
    except FailedError as error:
        print(f"{one.folder.name}: {error}", file=sys.stderr, flush=True)
    finally:
        if not arguments.keep:
            shutil.rmtree(one.folder, ignore_errors=True)
    return f"| {label} | {versions} | {told['demo']} | {told['tests']} | {time.monotonic() - begin:.0f} |"


def install(one: Environment, wheel: Path, torch: str) -> None:
    """Make the environment and install the wheel into it. Raises FailedError."""
    subprocess.run([one.python, "-m", "venv", "--clear", one.folder], check=True)
    pip = "-m", "pip", "install", "--quiet", "--no-compile"
    first = next((pin for pin in one.pins if pin.startswith("torch==")), torch)
    must(one.run(*pip, first), f"pip install {first}")
    asked = [f"{wheel}[{','.join(EXTRAS[one.kind])}]", *(one.pins or TOOLS)]
    must(one.run(*pip, *asked), f"pip install {' '.join(asked)}")
    must(one.run("-m", "pip", "check"), "pip check")


def installed(one: Environment) -> str:
    """The versions of the dependencies that matter most."""
    listed = must(one.run("-m", "pip", "list", "--format", "json"), "pip list")
    versions = {entry["name"].lower(): entry["version"] for entry in json.loads(listed)}
    return ", ".join(f"{name} {versions[name]}" for name in SHOWN)


def demo(one: Environment, work: Path) -> str:
    """Run the demo's recipe on the pico model, and export it. Raises FailedError."""
    model, out = ROOT / "tests" / "pico" / "model", work / "demo"
    shutil.copy(ROOT / "recipes" / "demo.yaml", work / "recipe.yaml")
    smaller = ["calibration.length=128", "eval.length=128", "passes.0.gptq.group_size=32", "save.dtype=float16"]
    smaller += ["save.verify=own"] if one.kind == "lowest" else []
    changes = [word for change in smaller for word in ("--set", change)]
    command = ["-m", "compress", "run", "recipe.yaml", "--model", str(model), "-o", str(out), *changes]
    must(one.run(*command, where=work), "compress run")
    must(
        one.run("-m", "compress", "export", str(out), "--format", "gguf", "-o", str(work / "gguf"), where=work),
        "compress export",
    )
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    (text,) = report["perplexity"]
    kernels = "with kernels" if native(one) else "without kernels"
    return f"{text['base']['perplexity']:.2f} -> {text['compressed']['perplexity']:.2f}, {kernels}"


def native(one: Environment) -> bool:
    """Whether the compiled kernels are in use."""
    code = "from compress.native.library import available; print(available())"
    return must(one.run("-c", code, where=one.folder), "loading the kernels").strip() == "True"


def tests(one: Environment, work: Path, parts: list[str]) -> str:
    """Run tests on the installed package. Raises FailedError."""
    for name in ("tests", "recipes", "calibration", "docs", "eval"):
        shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", work)
    done = one.run("-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *parts, where=work)
    counts = {kind.rstrip("s"): int(count) for count, kind in COUNTS.findall(done.stdout[-2000:])}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:], file=sys.stderr, flush=True)
        return f"FAILED: {told}"
    return told


def must(done: subprocess.CompletedProcess[str], what: str) -> str:
    """The output of a command. Raises FailedError."""
    if done.returncode:
        raise FailedError(f"{what} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
