"""Recipes by name: the folder that the wheel maps, what is found for a word, and the commands."""

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import compress
from compress.cli import main
from compress.errors import RecipeError
from compress.recipe.shipped import INSTALLED, SOURCES, find_recipe, shipped, summary_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """invoke(words) -> the result of the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(main, [*words])


def test_the_wheel_maps_the_folder_of_recipes():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]["wheel"]
    (target,) = (place for place, source in packages["packages"].items() if source == "recipes")
    assert target == INSTALLED.relative_to(ROOT).as_posix() and SOURCES == ROOT / "recipes"
    assert not INSTALLED.exists()  # in the sources, where it would hide the folder at the top
    assert {path.name for path in SOURCES.iterdir()} == {path.name for path in shipped().values()}


def test_every_recipe_says_what_it_is_for_in_one_line():
    summaries = {name: summary_of(path) for name, path in shipped().items()}
    assert [name for name, text in summaries.items() if not re.fullmatch(r"[A-Z0-9].{20,}\.", text)] == []


def test_a_name_is_a_shipped_recipe_unless_a_file_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("qtip-1.5") == shipped()["qtip-1.5"]
    (tmp_path / "gptq").mkdir()
    assert find_recipe("gptq") == shipped()["gptq"]  # a folder is no recipe
    for name in ("awq", "awq.yaml"):
        (tmp_path / name).write_text("")
        assert find_recipe(name) == Path(name)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("best-int5", "recipe 'best-int5' is neither a file nor a shipped recipe; did you mean 'best-int4'?"),
        ("zzz", "recipe 'zzz' is neither a file nor a shipped recipe; `compress recipes` lists the shipped ones"),
        ("recipes/rtn.yaml", "recipes/rtn.yaml: there is no such file; 'rtn' alone is the shipped recipe of this name"),
        ("mine.yaml", "mine.yaml: cannot be read"),
        ("./zzz", "zzz: cannot be read"),
    ],
)
def test_a_word_that_is_neither_is_an_error(word, message, invoke):
    with pytest.raises(RecipeError, match=re.escape(message)):
        compress.Recipe.from_yaml(word)
    done = invoke("plan", word, "--model", "m")
    assert done.exit_code == 2 and message in done.stderr


def test_commands_take_names(invoke, pico):
    planned = invoke("plan", "rtn", "--model", pico, "--set", "passes.0.rtn.group_size=32", "--json")
    assert planned.exit_code == 0 and json.loads(planned.stdout)["layers"]
    done = invoke("run", "rtn", "--model", pico, "--set", "passes.0.rtn.group_size=32", "--eval", "none")
    assert done.exit_code == 0 and Path("out/rtn/recipe.yaml").exists(), done.output


def test_the_shipped_recipes_are_listed(invoke):
    lines = invoke("recipes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped()) and len(lines) > 80
    listed = json.loads(invoke("recipes", "--json").stdout)
    assert {"name": "rtn", "summary": summary_of(shipped()["rtn"])} in listed and len(listed) == len(lines)


def test_a_shipped_recipe_is_printed(invoke):
    text = (ROOT / "recipes" / "rtn.yaml").read_text(encoding="utf-8")
    assert invoke("recipes", "rtn").stdout == text == json.loads(invoke("recipes", "rtn", "--json").stdout)["text"]
    done = invoke("recipes", "rtm")
    assert done.exit_code == 2 and "did you mean 'rtn'?" in done.stderr
