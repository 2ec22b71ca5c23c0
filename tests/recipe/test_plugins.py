"""Passes of other authors: files, module:Class, entry points; what is loaded, and what is refused with which words."""

import re
import sys
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

import compress
from compress import Recipe
from compress.cli import main
from compress.errors import RecipeError
from compress.passes.contract.discovery import classes_by_file
from compress.passes.contract.passes import Pass
from compress.recipe import installed, plugins

SOURCE = '''
"""A pass of another author."""

from typing import ClassVar

from pydantic import Field

from compress.authoring import LayerPass, Solution


class {title}(LayerPass):
    """Multiply every weight by a factor."""

    paper: ClassVar[str] = "https://example.org/scaled"

    factor: float = Field(default=0.5, gt=0, description="the factor")

    def solve(self, weight, seen, layer):
        return Solution({result})
'''


def source(title="MyPass", result="weight * self.factor"):
    return SOURCE.format(title=title, result=result)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_pass.py").write_text(source())
    return tmp_path


def written(folder, passes, listed="[./my_pass.py]"):
    path = folder / "recipe.yaml"
    path.write_text(f"model: m\nplugins: {listed}\npasses:\n  - {passes}\n")
    return path


def test_a_file_beside_the_recipe_is_a_pass_under_its_name(folder, monkeypatch):
    recipe = Recipe.from_yaml(written(folder, "my_pass: {factor: 2, targets: '*.mlp.*'}"))
    [step] = recipe.passes
    assert (step.key(), step.factor, step.targets) == ("my_pass", 2, ("*.mlp.*",))
    assert recipe.labels() == ["passes[0] my_pass"]
    assert recipe.plugins == (str(folder / "my_pass.py"),)
    assert Recipe.from_text(recipe.to_yaml()) == recipe
    monkeypatch.chdir(folder)  # in Python, relative to the working folder
    assert Recipe(model="m", plugins=["my_pass.py"], passes=[{"my_pass": {"factor": 2}}]).passes[0].factor == 2


def test_the_same_text_is_the_same_class_and_another_text_is_another(folder):
    first = plugins.load_file(folder / "my_pass.py")
    (folder / "copy").mkdir()
    (folder / "copy" / "my_pass.py").write_text(source())
    assert plugins.load_file(folder / "copy" / "my_pass.py").step is first.step
    (folder / "my_pass.py").write_text(source(result="weight + self.factor"))  # as long, and in the same second
    assert plugins.load_file(folder / "my_pass.py").step is not first.step
    assert "weight + self.factor" in plugins.module_text(plugins.load_file(folder / "my_pass.py").step.__module__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("my_pass: {faktor: 2}", r"recipe.yaml:4:\d+: passes\[0\] my_pass faktor: .*did you mean 'factor'"),
        ("my_pass: {factor: -1}", r"recipe.yaml:4:\d+: passes\[0\] my_pass factor: .*greater than 0"),
        ("my_pas: {}", r"recipe.yaml:4:\d+: passes\[0\] my_pas: pass 'my_pas' is not known; did you mean 'my_pass'"),
    ],
)
def test_options_and_keys_are_checked_as_those_of_other_passes(options, message, folder):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_yaml(written(folder, options))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "empty.py",
            "x = 1\n",
            r"plugins\[0\]: .*empty.py: defines no pass; define a class that derives from LayerPass",
        ),
        (
            "other.py",
            source(),
            r"plugins\[0\]: .*other.py defines MyPass, but .* call the class Other, or rename the file",
        ),
        ("wanda.py", source("Wanda"), r"plugins\[0\]: .*wanda is a pass of compress already; rename the file"),
        (
            "broken.py",
            "import nothing_of_this_name\n",
            r"its code raises ModuleNotFoundError: .*\(line 1\); correct it",
        ),
        ("wrong.py", "def f(:\n", r"wrong.py: its code raises SyntaxError"),
        ("raising.py", "x = 1\ny = x / 0\n", r"raising.py: its code raises ZeroDivisionError: .*\(line 2\)"),
        ("verbless.py", source("Verbless").replace("solve", "sovle"), r"Verbless does not define solve; define it"),
        ("notes.txt", "text", r"notes.txt: its code raises|defines no pass"),
    ],
)
def test_files_that_are_no_plugins(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=message):
        Recipe.from_yaml(written(tmp_path, "rtn: {}", f"[{name}]"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RecipeError, match=r"recipe.yaml:2:\d+: plugins\[0\]: .*lost.py: cannot be read .* relative to"):
        Recipe.from_yaml(written(tmp_path, "rtn: {}", "[lost.py]"))


def test_two_files_with_one_key(folder):
    (folder / "more").mkdir()
    (folder / "more" / "my_pass.py").write_text(source(result="weight"))
    with pytest.raises(RecipeError, match=r"plugins\[1\]: .*more/my_pass.py: .*my_pass.py holds a pass my_pass too"):
        Recipe.from_yaml(written(folder, "my_pass: {}", "[my_pass.py, more/my_pass.py]"))


# module:Class


@pytest.fixture
def module(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    (folder / "a_module_of_mine.py").write_text(source("Thing"))
    yield "a_module_of_mine"
    sys.modules.pop("a_module_of_mine", None)


def test_a_class_of_an_importable_module(module, folder):
    recipe = Recipe.from_yaml(written(folder, f"'{module}:Thing': {{factor: 3}}", "[]"))
    assert recipe.labels() == ["passes[0] thing"] and recipe.passes[0].factor == 3
    assert f"- {module}:Thing:" in recipe.to_yaml()
    assert Recipe.from_text(recipe.to_yaml()) == recipe


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("a_module_of_mine:Thign", r"the module has no class 'Thign'; did you mean 'Thing'"),
        ("a_module_of_mine:Field", r"is not a pass; name a class that derives from LayerPass"),
        ("a_module_of_mine:LayerPass", r"LayerPass does not define solve"),
        ("no_module_of_this_name:Thing", r"must be importable .* importing it raises ModuleNotFoundError"),
        ("a module:Thing", r"is not module:Class, such as my_package.my_pass:MyPass"),
        (
            "__main__:Thing",
            r"a class of a script, a notebook or a function cannot be read again; put it into a separate file",
        ),
    ],
)
def test_keys_that_are_no_classes_of_passes(key, message, module):
    with pytest.raises(RecipeError, match=rf"^passes\[0\] {key}: .*{message}"):
        Recipe(model="m", passes=[{key: {}}])


def test_a_class_of_this_package_keeps_its_name():
    recipe = Recipe(model="m", passes=[{"compress.passes.prune.wanda:Wanda": {}}])
    assert "- wanda:" in recipe.to_yaml()


# Entry points


@pytest.fixture
def declared(monkeypatch, module):
    """declared(name=value, ...): the entry points of installed packages."""

    def declare(*points):
        found = [EntryPoint(name, value, installed.GROUP) for name, value in points]
        monkeypatch.setattr(installed, "entry_points", lambda group: found)
        installed.installed.cache_clear()

    yield declare
    installed.installed.cache_clear()


def test_a_pass_of_an_installed_package(declared, module):
    declared(("thing", f"{module}:Thing"), ("broken", "no_module_of_this_name:Broken"))  # only what is named is loaded
    recipe = Recipe(model="m", passes=[{"thing": {"factor": 4}}])
    assert recipe.labels() == ["passes[0] thing"] and "- thing:" in recipe.to_yaml()
    assert Recipe.from_text(recipe.to_yaml()) == recipe
    with pytest.raises(RecipeError, match="did you mean 'thing'"):
        Recipe(model="m", passes=["thingy"])
    with pytest.raises(RecipeError, match=r"entry point 'broken' .*loading no_module_of_this_name:Broken raises"):
        Recipe(model="m", passes=["broken"])


@pytest.mark.parametrize(
    ("points", "asked", "message"),
    [
        (
            [("wanda", "a_module_of_mine:Thing")],
            "wanda",
            r"wanda is a pass of compress already; write a_module_of_mine:",
        ),
        (
            [("a", "a_module_of_mine:Thing")],
            "a",
            r"the key of a_module_of_mine:Thing is thing; give the entry point this",
        ),
        (
            [("thing", "a_module_of_mine:Thing"), ("thing", "b:Thing")],
            "thing",
            r"it is a_module_of_mine:Thing and b:Thing",
        ),
    ],
)
def test_entry_points_in_each_others_way(points, asked, message, declared):
    declared(*points)
    with pytest.raises(RecipeError, match=message):
        Recipe(model="m", passes=[asked])


def test_a_plugin_file_in_the_way_of_an_installed_package(declared, folder, module):
    declared(("my_pass", f"{module}:Thing"))
    with pytest.raises(RecipeError, match="pass 'my_pass' is in plugins and in an installed package"):
        Recipe.from_yaml(written(folder, "my_pass: {}"))


def test_all_that_is_available_is_listed(declared, folder, module):
    declared(("thing", f"{module}:Thing"))
    found = plugins.available([str(folder / "my_pass.py")])
    assert list(found)[-2:] == ["thing", "my_pass"] and set(compress.PASSES) < set(found)
    shown = CliRunner().invoke(main, ["passes", "--plugin", str(folder / "my_pass.py")]).output
    assert re.search(r"^my_pass +Multiply every weight by a factor\.$", shown, re.MULTILINE)
    page = CliRunner().invoke(main, ["passes", "my_pass", "--plugin", str(folder / "my_pass.py")]).output
    assert "factor = 0.5 (a number above 0): the factor" in page


# Files of passes/


def test_a_file_of_the_package_whose_class_has_another_name_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "some_passes").mkdir()
    (tmp_path / "some_passes" / "__init__.py").write_text("")
    (tmp_path / "some_passes" / "clip.py").write_text(source("Clips"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"clip.py defines Clips, .* call the class Clip, or rename the file"):
        classes_by_file("some_passes", [str(tmp_path / "some_passes")], Pass)


# A run


def test_a_run_with_a_plugin_can_be_run_again_from_its_own_folder(folder, pico, texts, tmp_path):
    path = folder / "recipe.yaml"
    path.write_text(
        f"model: {pico}\ncalibration: {{source: {texts['calibration']}, sequences: null, length: null}}\n"
        "plugins: [my_pass.py]\npasses:\n  - my_pass: {targets: '*.o_proj'}\n"
        "save: {format: dense}\neval: {perplexity: []}\n"
    )
    recipe, out = Recipe.from_yaml(path), tmp_path / "out"
    first = compress.run(recipe, out).report
    (folder / "my_pass.py").unlink()  # the folder has all that it needs
    again = Recipe.from_yaml(out / "recipe.yaml")
    assert again.passes == recipe.passes
    assert again.plugins == (str(out / "plugins" / "my_pass.py"),)
    assert compress.run(again, out).report["checkpoint_sha256"] == first["checkpoint_sha256"]
    compress.run(again.model_copy(update={"seed": 1}), out, overwrite=True)  # its own plugin is not lost
    assert (out / "plugins" / "my_pass.py").read_text() == source()
