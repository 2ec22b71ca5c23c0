"""Defaults follow the model, with a note; what a recipe states is refused, and all mistakes are listed at once."""

import json
import re
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

import compress
from compress import AWQ, RTN, Calibration, Evaluate, Recipe, Wanda, cli
from compress.errors import CalibrationError, SeveralErrors, TargetError

POSITIONS = 48


@pytest.fixture(scope="module")
def short(pico, tmp_path_factory) -> str:
    """The pico model with a context of 48 tokens."""
    folder = shutil.copytree(pico, tmp_path_factory.mktemp("short") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return str(folder)


def test_default_lengths_are_those_of_the_model(short, tmp_path):
    asked = Recipe(
        model=short, calibration={"sequences": 4}, passes=[{"gptq": {"group_size": 32}}], eval={"windows": 8}
    )
    told = [note for note in compress.plan(asked).notes if "default" in note]
    assert [note.partition(",")[0] for note in told] == ["calibration: length is 48", "eval: length is 48"]
    result = compress.run(asked, tmp_path / "out", progress=False)
    assert set(told) <= {entry.message for entry in result.journal.entries if entry.where == "plan"}
    stated = Recipe.from_yaml(tmp_path / "out" / "recipe.yaml")
    assert (stated.calibration.length, stated.eval.length) == (POSITIONS, POSITIONS)


@pytest.mark.parametrize("part", ["calibration", "eval"])
def test_a_length_that_the_recipe_states_is_refused(part, short):
    with pytest.raises(CalibrationError, match=rf"^{part}: length 512 exceeds the model's 48 positions"):
        compress.plan(Recipe(model=short, passes=[{"rtn": {}}], **{part: {"length": 512}}))


def test_the_lengths_of_a_suite_are_defaults(short):
    assert any("eval: length is 48" in note for note in compress.plan(suite(short, {})).notes)
    with pytest.raises(CalibrationError, match="eval: length 64 exceeds"):
        compress.plan(suite(short, {"length": 64}))


def suite(model, options):
    settings = {"suite": "quick", "tasks": (), **options}
    return Recipe(model=model, passes=[{"rtn": {}}], eval=settings)


def test_a_file_of_ids_has_as_many_as_it_has(tiny_folder, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(6 * 24).reshape(6, 24) % 60)
    source = str(tmp_path / "ids.npy")
    asked = {"model": tiny_folder("llama"), "passes": [{"rtn": {"group_size": 16}}]}
    planned = compress.plan(Recipe(**asked, calibration={"source": source}, eval={"perplexity": [source]}))
    changed = [note.partition(",")[0] for note in planned.notes if "default" in note]
    assert changed == [
        "calibration: sequences is 6",
        "calibration: length is 24",
        "eval: windows is 6",
        "eval: length is 24",
    ]
    with pytest.raises(CalibrationError, match="7 sequences of 24 are requested"):
        compress.plan(Recipe(**asked, calibration={"source": source, "sequences": 7}, eval=None))


def test_an_evaluation_has_windows_of_the_model(short):
    found = CliRunner().invoke(cli.main, ["eval", short, "--windows", "2", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["settings"]["length"] == POSITIONS


@pytest.mark.parametrize("steps", [(RTN(),), (AWQ(), RTN())])
def test_a_default_group_size_becomes_smaller(steps, tiny_folder, recipe, tmp_path):
    asked = recipe(*steps, model=tiny_folder("llama"), save={"verify": "own"})
    told = [note for note in compress.plan(asked).notes if "group_size is 32" in note]
    assert [note.partition(": ")[0] for note in told] == asked.labels()
    compress.run(asked, tmp_path / "out", progress=False)
    stated = Recipe.from_yaml(tmp_path / "out" / "recipe.yaml")
    assert [step.group_size for step in stated.passes] == [32] * len(steps)
    compress.run(stated, tmp_path / "again", progress=False)
    weights = [[p.read_bytes() for p in sorted(tmp_path.glob(f"{name}/*.safetensors"))] for name in ("out", "again")]
    assert weights[0] == weights[1] and len(weights[0]) > 1


def test_a_group_size_that_the_recipe_states_is_refused(tiny_folder, recipe):
    with pytest.raises(TargetError, match="group_size 64 is larger than its 32 inputs"):
        compress.plan(recipe(RTN(group_size=64), model=tiny_folder("llama")))


WRONG = {
    "passes and texts": (
        {
            "passes": [RTN(targets="*.q_porj"), Wanda(ignore="*.v_porj")],
            "calibration": Calibration(length=512),
            "eval": Evaluate(length=512),
        },
        [r"passes\[0\] rtn: targets", r"passes\[1\] wanda: ignore", "calibration: length 512", "eval: length 512"],
    ),
    "a layer and a text": (
        {"passes": [RTN(weights="nf4")], "calibration": Calibration(length=512)},
        [r"passes\[0\] rtn: .*no layout", "calibration: length 512"],
    ),
    "servers and a text": (
        {"passes": [RTN(group_size=32)], "save": {"tensor_parallel": 3}, "eval": Evaluate(length=512)},
        ["save: tensor_parallel: 3", "eval: length 512"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_all_mistakes_are_listed_at_once(name, short, tmp_path):
    options, messages = WRONG[name]
    asked = Recipe(model=short, **options)
    for work in (lambda: compress.plan(asked), lambda: compress.run(asked, tmp_path / "out", progress=False)):
        with pytest.raises(SeveralErrors) as caught:
            work()
        lines = str(caught.value).splitlines()
        assert lines[0] == f"{len(messages)} problems:" and len(lines) == 1 + len(messages)
        for message, line in zip(messages, lines[1:], strict=True):
            assert re.match(f"- {message}", line)
    assert not list(tmp_path.glob("out/*.safetensors")) and caught.value.exit_code == 2


def test_the_command_line_prints_a_line_for_each(short, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(Recipe(model=short, **WRONG["a layer and a text"][0]).to_yaml())
    done = CliRunner().invoke(cli.main, ["plan", str(path)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error"] * 3, done.stderr
