"""Paths in a recipe file are relative to its folder, on the command line and in Python to the current folder."""

import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import yaml
from click.testing import CliRunner

import compress
from compress import RTN, Calibration, Evaluate, Recipe, cli
from compress.errors import OutputError, RecipeError
from compress.passes import PASSES
from compress.passes.contract.options import ModelSource
from compress.pipeline.provenance import changed_inputs, inputs_of
from compress.pipeline.sources import original_of
from compress.recipe.paths import stored, without_folders

WORDS = "The quick brown fox jumps over the lazy dog. " * 100


def call(*args):
    """compress ARGS; returns click's result, whose stdout and stderr are apart."""
    return CliRunner().invoke(cli.main, [str(a) for a in args])


@pytest.fixture
def project(pico, tmp_path, monkeypatch):
    """A project with recipes/, models/, texts/ and a shell in another folder."""
    for name in ("recipes", "models", "texts", "elsewhere"):
        (tmp_path / "work" / name).mkdir(parents=True)
    folder = tmp_path / "work"
    shutil.copytree(pico, folder / "models" / "pico")
    for name in ("a", "b"):
        (folder / "texts" / f"{name}.txt").write_text(f"{name} {WORDS}")
    (folder / "texts" / "chat.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(folder / "elsewhere")
    return folder


def written(project, text, name="recipes/r.yaml"):
    (project / name).write_text(text)
    return project / name


EVERYTHING = """
model: ../models/pico
plugins: [../texts/own.py]
calibration:
  mixture: [{source: ../texts/a.txt}, {source: chats.jsonl, chat_template: ../texts/chat.jinja}, {dataset: rows.parquet}]
passes:
  - distill: {teacher: ../models/pico}
  - rtn: {group_size: 32}
eval: {perplexity: [../texts/b.txt, embedded, {dataset: ../texts/set.csv}], tasks: [piqa, task.yaml], data: ../texts}
"""


def test_every_path_of_a_file_is_relative_to_it(project):
    source = "from compress.passes.quantize.rtn import RTN\n\nclass Own(RTN):\n    '''A pass.'''\n"
    (project / "texts" / "own.py").write_text(source)
    read = Recipe.from_yaml(written(project, EVERYTHING))
    texts, recipes, model = project / "texts", project / "recipes", str(project / "models" / "pico")
    assert read.model == read.passes[0].teacher == model
    assert read.plugins == (str(texts / "own.py"),)
    first, second, third = read.calibration.mixture
    assert (first.source, second.source, third.dataset) == tuple(
        map(str, (texts / "a.txt", recipes / "chats.jsonl", recipes / "rows.parquet"))
    )
    assert second.chat_template == str(texts / "chat.jinja")
    assert read.eval.perplexity[:2] == (str(texts / "b.txt"), "embedded")
    assert read.eval.perplexity[2].dataset == str(texts / "set.csv")
    assert read.eval.tasks == ("piqa", str(recipes / "task.yaml")) and read.eval.data == str(texts)


OWN = """from pathlib import Path

from pydantic import BaseModel

from compress.passes.contract.options import ModelSource
from compress.passes.quantize.rtn import RTN


class Limits(BaseModel):
    table: Path | None = None


class Own(RTN):
    '''A pass.'''

    limits: Limits = Limits()
    masks: tuple[Path, ...] = ()
    judge: ModelSource | None = None
    note: str = ""

    def solve(self, weight, statistics, layer):
        factor = float(self.limits.table.read_text())
        return super().solve(weight * factor, statistics, layer)
"""


def test_the_paths_among_the_options_of_a_plugin_are_relative_to_the_recipe(project, monkeypatch):
    (project / "recipes" / "own.py").write_text(OWN)
    (project / "texts" / "table.txt").write_text("0.5")
    options = "limits: {table: ../texts/table.txt}, masks: [a.npy, ~/b.npy], judge: ../models/pico, note: ../note"
    monkeypatch.setenv("HOME", str(project))
    path = written(
        project,
        f"model: ../models/pico\nplugins: [own.py]\npasses: [own: {{group_size: 32, {options}}}]\neval: null\n"
        "save: {format: native}\n",
    )
    [step] = Recipe.from_yaml(path).passes
    assert (step.limits.table, step.judge) == (project / "texts" / "table.txt", str(project / "models" / "pico"))
    assert step.masks == (project / "recipes" / "a.npy", project / "b.npy") and step.note == "../note"

    report = compress.run(path, project / "out", progress=False).report
    options = report["reproduce"]["recipe"]["passes"][0]["own"]
    assert (options["limits"]["table"], options["judge"]) == ("../texts/table.txt", "../models/pico")
    monkeypatch.chdir("/")
    again = compress.run(project / "out" / "recipe.yaml", project / "again", progress=False).report
    assert again["checkpoint_sha256"] == report["checkpoint_sha256"]
    (project / "texts" / "table.txt").write_text("0.25")
    with pytest.raises(OutputError, match="contains another run .a file that a pass reads is another one"):
        compress.run(path, project / "out", progress=False)


def test_every_option_of_a_pass_that_names_a_file_is_a_path():
    """Paths are relative to the recipe, and a resumed run notices that their files changed."""
    for kind in PASSES.values():
        for name, field in kind.model_fields.items():
            names_file = re.search(r"\b(file|folder)\b", field.description or "") is not None
            kinds = {field.annotation, *get_args(field.annotation)}
            assert kinds & {Path, ModelSource} or not names_file, f"{kind.__name__}.{name}: {field.description}"


def test_a_changed_importance_matrix_or_teacher_is_another_input(project):
    (project / "weights.dat").write_bytes(b"1")
    shutil.copytree(project / "models" / "pico", project / "models" / "teacher")
    steps = "passes: [rtn: {imatrix: ../weights.dat, weights: int4}, distill: {teacher: ../models/teacher}]\n"
    path = written(project, f"model: ../models/pico\n{steps}")
    states = [inputs_of(Recipe.from_yaml(path), "model", "text")]
    assert set(states[0]["files"]) == {str(project / "weights.dat"), str(project / "models" / "teacher")}
    (project / "weights.dat").write_bytes(b"2")
    states.append(inputs_of(Recipe.from_yaml(path), "model", "text"))
    config = project / "models" / "teacher" / "config.json"
    config.write_text(config.read_text() + " ")
    states.append(inputs_of(Recipe.from_yaml(path), "model", "text"))
    for before, after in pairwise(states):
        assert changed_inputs(before, after) == "a file that a pass reads is another one"


def test_names_are_no_paths(project):
    read = Recipe.from_yaml(written(project, "model: owner/name@main\npasses: [rtn]\n"))
    assert (read.model, read.calibration.source) == ("owner/name@main", "embedded")


def test_a_suite_of_a_file_is_relative_to_it(project):
    (project / "recipes" / "mine.yaml").write_text("windows: 3\n")
    for text in ("eval: mine.yaml", "eval: {suite: mine.yaml}"):
        assert Recipe.from_yaml(written(project, f"model: m\npasses: [rtn]\n{text}\n")).eval.windows == 3


def test_settings_are_relative_to_the_shell(project):
    path = written(project, "model: ../models/none\ncalibration: {source: ../texts/a.txt}\npasses: [rtn]\n")
    done = call(
        "plan",
        path,
        "--model",
        "../models/pico",
        "--calibration",
        "../texts/b.txt",
        "--eval",
        "none",
        "--set",
        "calibration.length=32",
        "--set",
        "passes.0.rtn.group_size=32",
    )
    assert done.exit_code == 0, done.output


def test_a_home_folder_is_that_of_the_user(project, monkeypatch):
    monkeypatch.setenv("HOME", str(project))
    read = Recipe.from_yaml(
        written(project, "model: ~/models/pico\ncalibration: {source: ~/texts/a.txt}\npasses: [rtn]\n")
    )
    assert (read.model, read.calibration.source) == (f"{project}/models/pico", f"{project}/texts/a.txt")
    done = call(
        "plan",
        written(project, "model: ../models/pico\npasses: [rtn: {group_size: 32}]\n"),
        "--eval=none",
        "--calibration=~/texts/a.txt",
        "--set",
        "calibration.length=32",
    )
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("model: models/pico", ":1:1: model: models/pico"),
        ("model: m\neval: {perplexity: [texts/a.txt]}", "texts/a.txt"),
    ],
)
def test_a_path_that_is_relative_to_the_shell_is_refused(line, place, project, monkeypatch):
    monkeypatch.chdir(project)
    path = written(project, f"{line}\npasses: [rtn]\n")
    with pytest.raises(RecipeError, match="is not in the folder of the recipe, .* write \\.\\./") as caught:
        Recipe.from_yaml(path)
    assert place in str(caught.value)


SMALL = "calibration: {source: ../texts/a.txt, sequences: 2, length: 32}\npasses: [{rtn: {group_size: 32}}]\n"
EVALUATED = "eval: {perplexity: [../texts/b.txt], windows: 2, length: 32}\n"


def test_the_recipe_of_a_run_runs_from_anywhere(project, monkeypatch):
    out = project / "out" / "one"
    done = call("run", written(project, f"model: ../models/pico\n{SMALL}{EVALUATED}"), "-o", "../out/one")
    assert done.exit_code == 0, done.output
    stated = yaml.safe_load((out / "recipe.yaml").read_text())
    assert stated["model"] == "../../models/pico" and stated["eval"]["perplexity"] == ["../../texts/b.txt"]
    moved = project.with_name("moved")
    shutil.copytree(project, moved)
    shutil.rmtree(project / "models")  # the copy is independent of the original
    for place in (moved, "/"):
        monkeypatch.chdir(place)
        again = call("run", moved / "out" / "one" / "recipe.yaml", "-o", moved / "out" / "two", "--overwrite")
        assert again.exit_code == 0, again.output
        digest = [line for line in again.stdout.splitlines() if line.startswith("checkpoint sha256")]
        assert digest == [line for line in done.stdout.splitlines() if line.startswith("checkpoint sha256")]


def test_the_origin_of_a_chain_is_found_from_anywhere(recipe, project, monkeypatch):
    first = recipe(RTN(group_size=32), model="../models/pico", eval=None, save={"format": "native"})
    compress.run(first, "../out", progress=False)
    monkeypatch.chdir("/")
    assert original_of(str(project / "out")) == str(project / "models" / "pico")


def test_init_writes_paths_for_the_place_of_the_recipe(project):
    done = call(
        "init", "../models/pico", "--text", "../texts/a.txt", "-o", "../recipes/new.yaml", "--target", "8 bits, CPU"
    )
    assert done.exit_code == 0, done.output
    text = (project / "recipes" / "new.yaml").read_text()
    assert "model: ../models/pico" in text and "../texts/a.txt" in text
    Recipe.from_yaml(project / "recipes" / "new.yaml")


def test_paths_far_from_a_folder_are_absolute_or_names(tmp_path):
    far = {"model": os.path.abspath("/srv/models/m"), "plugins": ["/srv/p.py"], "seed": 1}
    assert stored(far, tmp_path) == far
    assert stored(far, tmp_path, public=True) == {"model": "m", "plugins": ["p.py"], "seed": 1}
    near = {"model": str(tmp_path / "m"), "calibration": {"source": str(tmp_path / "a.txt")}}
    assert stored(near, tmp_path / "out", public=True) == {"model": "../m", "calibration": {"source": "../a.txt"}}
    assert stored(near, tmp_path, public=True) == {"model": "./m", "calibration": {"source": "a.txt"}}


def test_texts_of_a_report_name_files_without_folders(tmp_path):
    data = {"model": str(tmp_path / "m"), "calibration": {"source": "texts/a.txt"}}
    report = {"source": data["model"], "journal": [f"{tmp_path}/m/config.json is old", "texts/a.txt"], "n": 1}
    assert without_folders(report, data) == {"source": "m", "journal": ["m/config.json is old", "a.txt"], "n": 1}


def test_a_recipe_in_python_takes_a_path(pico, tmp_path):
    text = tmp_path / "a.txt"
    read = Recipe(
        model=Path(pico),
        passes=[RTN()],
        calibration=Calibration(source=text),
        eval=Evaluate(perplexity=[text], data=tmp_path),
    )
    assert read.model == pico and read.calibration.source == read.eval.perplexity[0] == str(text)
    assert read.eval.data == str(tmp_path)
