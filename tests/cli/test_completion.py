"""Completion: the scripts of the shells, and what they are offered; nothing slow is imported for it."""

import os
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from compress.cli import main
from compress.cli.completion import SHELLS, VARIABLE
from compress.passes import PASSES
from compress.recipe.evaluation import suites
from compress.recipe.presets import presets
from compress.recipe.shipped import shipped
from compress.roofline.devices import devices


def offered(*words: str) -> list[str]:
    """What is offered for the last word."""
    return [
        item.value for item in ShellComplete(main, {}, "compress", VARIABLE).get_completions([*words[:-1]], words[-1])
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script_that_asks_the_program(shell):
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0 and f"{VARIABLE}={shell}_complete" in done.stdout and "compress" in done.stdout


def test_another_shell_is_a_mistake():
    done = CliRunner().invoke(main, ["completion", "tcsh"])
    assert done.exit_code == 2 and "'bash', 'zsh', 'fish'" in done.stderr


def test_names_are_offered():
    assert offered("passes", "") == sorted(PASSES) and offered("passes", "gp") == ["gptq"]
    assert offered("prune", "m", "--method", "wan") == ["wanda"]
    assert offered("quantize", "m", "--scheme", "w4a16") == ["W4A16", "W4A16-asym"]
    assert sorted(offered("quantize", "m", "--scheme", "")) == sorted(presets())
    assert set(offered("eval", "m", "--suite", "")) >= set(suites())
    assert offered("run", "r.yaml", "--device", "") == ["auto", "cpu", "cuda"] == offered("eval", "m", "--device", "")
    assert set(offered("roofline", "m", "--on", "")) == {"here", *devices()}
    assert offered("init", "m", "--target", "4 bits, v") == ["4 bits, vLLM"]
    assert "quantize" in offered("") and offered("completion", "") == list(SHELLS)


def test_shipped_recipes_are_offered():
    assert (
        offered("run", "best-int4") == offered("plan", "best-int4") == offered("recipes", "best-int4") == ["best-int4"]
    )
    assert offered("roofline", "qtip-1") == ["qtip-1.5"]


def test_recipes_are_offered_from_here_and_the_folders_here(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    for name in ("a.yaml", "b.txt", "recipes/c.yaml"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert offered("run", "") == offered("plan", "") == [*shipped(), "a.yaml", "recipes/c.yaml"]
    assert offered("run", "recipes/") == ["recipes/c.yaml"] and offered("run", "nothing") == ["nothing"]  # any file


def test_bash_gets_its_answer_and_no_torch(tmp_path):
    """In a process of its own, as the script asks; torch would take seconds."""
    env = {**os.environ, VARIABLE: "bash_complete", "COMP_WORDS": "compress passes gp", "COMP_CWORD": "2"}
    code = "import sys; from compress.cli import main\ntry:\n main(prog_name='compress')\nfinally:\n assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("plain,gptq\n", "")
