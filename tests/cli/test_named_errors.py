"""Errors name what the user typed: the option, the file and the key that are wrong."""

import pytest
from click.testing import CliRunner

import compress
from compress import RTN, cli
from compress.errors import CalibrationError, ModelError, TargetError, did_you_mean


def call(*args):
    """compress ARGS; returns click's result, whose stdout and stderr are apart."""
    return CliRunner().invoke(cli.main, [str(a) for a in args])


def spelled(pico, path, *lines):
    """A recipe file for the pico model."""
    path.write_text("\n".join([f"model: {pico}", "calibration: {sequences: 2, length: 32}", *lines]) + "\n")
    return path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--eval", "no"), "error: --eval no: write --eval none for no evaluation"),
        (("--eval", "nosuch"), "error: eval: unknown source 'nosuch'"),
        (("--eval", "nosuch.txt"), "error: eval: cannot read nosuch.txt"),
        (("--calibration", "nosuch"), "error: calibration: unknown source 'nosuch'"),
        (("--model", "/nosuch"), "error: model: no folder /nosuch"),
    ],
)
def test_an_option_of_a_recipe_is_named(args, message, pico, tmp_path):
    path = spelled(pico, tmp_path / "r.yaml", "passes: [{rtn: {group_size: 32}}]")
    done = call("plan", path, *args)
    assert done.exit_code == 2 and done.stderr.startswith(message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--sparsity", "1.5"), "--sparsity 1.5: passes[0] sparsegpt sparsity: input should be less than 1"),
        (("--pattern", "4:2"), "--pattern 4:2: passes[0] sparsegpt"),
        (("--method", "wnda"), "--method wnda: passes[0] wnda: pass 'wnda' is not known; did you mean 'wanda'?"),
        (("--method", "wnda", "--sparsity", "0.4"), "--method wnda: passes[0] wnda: pass 'wnda' is not known"),
    ],
)
def test_an_option_of_prune_is_named(args, message, pico, tmp_path):
    done = call("prune", pico, *args, "-o", tmp_path / "out")
    assert done.exit_code == 2 and done.stderr.startswith(f"error: {message}")


def test_a_folder_in_the_place_of_a_recipe_is_named(tmp_path):
    for command in ("run", "plan"):
        done = call(command, tmp_path)
        assert done.exit_code == 2 and f"{tmp_path}: is a folder, not a recipe; write that of a .yaml" in done.stderr
    (tmp_path / "recipe.yaml").write_text("model: x\n")
    assert f"is a folder, not a recipe; write {tmp_path}/recipe.yaml" in call("run", tmp_path).stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("distill", "MODEL", "--teacher", "/nosuch"), "error: teacher: no folder /nosuch"),
        (("eval", "MODEL", "--base", "/nosuch"), "error: base: no folder /nosuch"),
        (("compare", "MODEL", "--base", "/nosuch"), "error: base: no folder /nosuch"),
        (("eval", "/nosuch", "--base", "MODEL"), "error: model: no folder /nosuch"),
        (("bench", "MODEL", "--against", "/nosuch"), "error: against: no folder /nosuch"),
        (("eval", "MODEL", "--text", "nosuch"), "error: eval: unknown source 'nosuch'"),
        (("sensitivity", "MODEL", "--choice", "int4", "--text", "nosuch"), "error: text: unknown source 'nosuch'"),
    ],
)
def test_the_argument_of_a_command_is_named(args, message, pico, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(*(arg.replace("MODEL", pico) for arg in args))
    assert done.exit_code == 2 and done.stderr.splitlines()[-1].startswith(message)


def test_the_teacher_of_a_pass_is_named_in_python(recipe, pico):
    with pytest.raises(ModelError, match="^teacher: no folder /nosuch"):
        compress.plan(recipe({"distill": {"teacher": "/nosuch"}}, save={"format": "dense"}))
    with pytest.raises(CalibrationError, match="^eval: unknown source 'no'"):
        compress.plan(recipe(RTN(group_size=32), eval={"perplexity": ["no"]}))


def test_a_message_does_not_list_thousands_of_names():
    names = [f"task_{i}" for i in range(10_000)]
    assert len(did_you_mean("nosuch", names)) < 1000
    assert "and 9940 more" in did_you_mean("nosuch", names)
    assert did_you_mean("task_70x", names).startswith("; did you mean 'task_7")
    assert did_you_mean("q", ["a", "b"]) == "; known: a, b"


BUGGY = '''
from typing import ClassVar

from compress.passes.contract.passes import LayerPass


def helper(weight):
    return weight.no_such_attribute


class Buggy(LayerPass):
    """A pass with a bug."""

    paper: ClassVar[str] = "https://example.org"

    def solve(self, weight, statistics, layer):
        return helper(weight)
'''


def test_the_bug_of_a_plugin_is_reported_with_its_file_and_line(pico, tmp_path):
    (tmp_path / "buggy.py").write_text(BUGGY)
    path = spelled(pico, tmp_path / "r.yaml", "plugins: [buggy.py]", "passes: [buggy]", "eval: null")
    done = call("run", path, "-o", tmp_path / "out")
    line = done.stderr.splitlines()[-1]
    assert done.exit_code == 1 and line.startswith(f"error: {tmp_path / 'buggy.py'}:8: AttributeError: ")
    assert "correct this pass" in line and "report it as a bug" not in line


def test_a_quantized_model_is_not_said_to_have_earlier_passes(recipe, pico_model, tmp_path):
    compress.save(compress.apply(pico_model, RTN(group_size=32)), tmp_path / "model")
    with pytest.raises(TargetError, match="is already quantized in the model that the passes start with") as caught:
        compress.plan(recipe(RTN(group_size=32), model=str(tmp_path / "model"), save={"format": "native"}))
    assert "earlier passes" not in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        "generate FOLDER hello",
        "eval FOLDER",
        "inspect FOLDER",
        "report FOLDER",
        "compare FOLDER FOLDER",
        "export FOLDER --format native -o OTHER",
        "quantize FOLDER --scheme W4A16 -o OTHER",
        "bench FOLDER",
        "roofline FOLDER",
    ],
)
def test_an_unfinished_run_is_said_to_be_one(command, recipe, stop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stop(recipe(RTN(group_size=32)), tmp_path / "folder")
    done = call(*command.replace("FOLDER", "folder").split())
    assert done.exit_code == 2, done.output
    assert "folder is the output folder of a run that is not finished; run the same command again" in done.stderr
