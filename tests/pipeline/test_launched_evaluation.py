"""`compress eval` in two processes of a real launcher, and one that is killed: the results are those of one process."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ENVIRONMENT, finish, fork

import compress

pytest.importorskip("lm_eval", reason="the package lm-eval is not installed")

LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]  # --cpu would start one
ITEMS = 120
WORDS = ["module", "function", "list", "value", "object", "returns", "class", "name", "file", "string", "number"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Items of two tasks, of random words."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)

    def some(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    rows = {
        "piqa/validation": [{"goal": some(20), "sol1": some(6), "sol2": some(6), "label": i % 2} for i in range(ITEMS)],
        "lambada_openai/test": [{"text": some(15)} for _ in range(ITEMS)],
    }
    for name, found in rows.items():
        (folder / name).parent.mkdir()
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


@pytest.fixture(scope="module")
def asked(pico, recipe, data, texts, tmp_path_factory):
    """asked(NAME) -> the arguments of `compress eval` for pico and a variant, with a folder of results of that name."""
    out = tmp_path_factory.mktemp("evaluated")
    compress.run(recipe(compress.RTN(weights="int3", group_size=32), eval=None), out / "small", progress=False)

    def arguments(name: str) -> list[str]:
        return [
            "compress",
            "eval",
            pico,
            str(out / "small"),
            "--text",
            texts["test"],
            "--length",
            "64",
            "--windows",
            "2",
            "--tasks",
            "piqa,lambada_openai",
            "--data",
            str(data),
            "--work",
            str(out / name),
            "-o",
            str(out / f"{name}.json"),
        ]

    return out, arguments


def measured(out: Path, name: str) -> dict:
    """The figures of a call, without digests and times."""
    found = json.loads((out / f"{name}.json").read_text())
    return {f"{i} {key}": value for i, model in enumerate(found["models"]) for key, value in flat(model).items()}


def flat(value, at: str = "") -> dict:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in pairs for k, v in flat(part, f"{at}.{key}").items()}
    return {} if "seconds" in at else {at: value}


def equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert other[key] == (pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value), key


@pytest.fixture(scope="module")
def alone(asked):
    out, arguments = asked
    run(arguments("alone"), 1)
    return measured(out, "alone")


def run(arguments: list[str], processes: int) -> None:
    for code, _, errors in finish(fork(["-m", *arguments], processes)):
        assert code == 0, errors


@pytest.mark.slow
def test_two_processes_measure_what_one_measures(asked, alone):
    out, arguments = asked
    done = subprocess.run(
        [sys.executable, *LAUNCH, "-m", *arguments("two")], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compared with") == 1  # the first process alone prints
    equal(alone, measured(out, "two"))
    files = {path.name: len(path.read_text().splitlines()) for path in (out / "two").glob("*/requests/*.jsonl")}
    assert files.keys() == {"0.jsonl", "1.jsonl"}  # each process computed a share
    assert any(".items.piqa.metrics.acc.value" in key for key in alone)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_evaluation_continues(asked, alone, processes):
    out, arguments = asked
    name = f"killed{processes}"
    started = fork(["-m", *arguments(name)], processes)
    while not lines(out / name) and all(process.poll() is None for process in started):
        time.sleep(0.005)
    for process in started:
        process.kill()
    for process in started:
        process.wait()
    before = lines(out / name)
    assert before and not (out / f"{name}.json").exists()
    run(arguments(name), processes)
    equal(alone, measured(out, name))
    after = lines(out / name)
    assert all(after[key] == value for key, value in before.items())  # what was there is not computed again
    total = sum(len(path.read_text().splitlines()) for path in (out / name).glob("*/requests/*.jsonl"))
    assert total <= len(after) + 1  # and stands once, but for a line that the kill cut off


def lines(folder: Path) -> dict[str, str]:
    """The whole lines of kept answers, by model and key."""
    found = {}
    for path in folder.glob("*/requests/*.jsonl"):
        for line in path.read_text().split("\n")[:-1]:
            found[f"{path.parent.parent.name} {line[:70]}"] = line
    return found
