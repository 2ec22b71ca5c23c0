"""`compress init`: the recipe of every start can be planned on the pico model; files that are there; models that are not."""

import json
import shutil

import pytest
from click.testing import CliRunner

from compress import Recipe, cli
from compress.errors import OutputError, SeveralErrors
from compress.pipeline.starting import start_recipe
from compress.recipe.targets import choose, starts


def call(*args):
    return CliRunner().invoke(cli.main, ["init", *map(str, args)])


@pytest.mark.parametrize("name", list(starts()))
@pytest.mark.few(6)
def test_every_start_can_be_planned(name, pico, tmp_path):
    target = ", ".join(values[0] for values in starts()[name].answers.values())
    made = start_recipe(pico, target, tmp_path / "r.yaml")
    assert made.start.name == name and made.planned is not None
    assert Recipe.from_yaml(tmp_path / "r.yaml").model == pico
    if starts()[name].sequences is None or "dense" not in starts()[name].body:
        assert made.planned.checkpoint_bytes < made.planned.dense_bytes


def test_every_value_of_every_kind_alone_leads_to_a_start():
    from compress.recipe.targets import words

    assert [choose([(kind, value)]).name for kind, values in words().items() for value in values]


def test_what_the_model_does_not_allow_becomes_smaller_and_is_told(pico, tiny_folder, tmp_path):
    made = start_recipe(pico, "2 bits", tmp_path / "r.yaml")
    assert made.changed[0].startswith("group_size is 32; otherwise: ") and "group_size: 32" in made.text
    short = shutil.copytree(pico, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    made = start_recipe(str(short), "4 bits, CPU", tmp_path / "s.yaml")
    assert any(line.startswith("length is 64") for line in made.changed) and "length: 64 " in made.text
    with pytest.raises(
        SeveralErrors, match="calibration: the model has no tokenizer"
    ):  # 32 and 48 wide, and no tokenizer
        start_recipe(tiny_folder("llama"), "4 bits", tmp_path / "t.yaml")
    assert not (tmp_path / "t.yaml").exists()


def test_text_of_the_model_itself_is_evaluated_on_the_embedded_text(pico, tmp_path):
    start_recipe(pico, "4 bits, CPU", tmp_path / "r.yaml", source="self")
    made = Recipe.from_yaml(tmp_path / "r.yaml")
    assert made.calibration.source == "self" and made.eval.perplexity == ("embedded",)


def test_the_command_writes_a_recipe_and_says_what_comes_next(pico, tmp_path):
    path = tmp_path / "r.yaml"
    done = call(pico, "--target", "8 bits, CPU", "-o", path)
    assert done.exit_code == 0, done.output
    assert "8 bits per weight" in done.stdout and f"next: compress run {path} -o out/r" in done.stdout
    assert "MB become" in done.stdout and path.read_text().startswith("# 8 bits per weight")
    again = call(pico, "-o", path)
    assert (again.exit_code, again.stdout) == (2, "") and "is there already" in again.stderr
    found = json.loads(call(pico, "-o", path, "--overwrite", "--no-check", "--json").stdout)
    assert found == {
        "recipe": str(path),
        "start": "int4",
        "summary": starts()["int4"].summary,
        "changed": [],
        "planned": None,
    }


def test_mistakes_are_one_line_and_write_nothing(pico, tmp_path):
    for args, message in [
        ([pico, "--target", "9 bits"], "'9' is not known; did you mean"),
        (["/no/such/model"], "/no/such/model"),
        ([pico, "-o", tmp_path], "is a folder; write the name of a file"),
    ]:
        path = [] if "-o" in args else ["-o", tmp_path / "r.yaml"]
        done = call(*args, *path)
        assert (done.exit_code, done.stdout) == (2, "") and message in done.stderr, done.output
        assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
    with pytest.raises(OutputError):
        start_recipe(pico, "4 bits", tmp_path)


def test_the_help_lists_the_words():
    shown = CliRunner().invoke(cli.main, ["init", "--help"]).stdout
    assert "llama.cpp" in shown and "half zero" in shown and "no visible loss" in shown
