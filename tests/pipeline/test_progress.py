"""Progress on standard error: a bar on a terminal, lines elsewhere; in Python as on the command line."""

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import compress
from compress.passes.contract.journal import Journal
from compress.pipeline.progress import Waiting, shown_progress


def hear(console: Console) -> None:
    journal = Journal()
    with shown_progress(journal, console):
        for block in range(40):
            journal.add(
                "progress", "passes[0] gptq", f"model.layers.{block}", block=block, blocks=40, step="passes[0] gptq"
            )
        journal.add("progress", "verify", "verifying the checkpoint")
        journal.add("progress", "evaluate", "perplexity of the base model", done=1, of=2)
        journal.add("fallback", "passes[0] gptq x", "[damping] raised")
        journal.add("note", "model", "not shown while it runs")
    assert journal.listeners == []


def test_a_bar_on_a_terminal():
    file = io.StringIO()
    hear(Console(file=file, force_terminal=True, width=100, markup=False))
    assert "\x1b[" in file.getvalue() and "━" in file.getvalue()
    text = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", file.getvalue())
    assert "model.layers.39  passes[0] gptq" in text and "40/40" in text
    end = text.splitlines()[-2:]
    assert "40/40" in end[0] and "2/2" in end[1] and "verifying the checkpoint" not in "".join(end)
    assert "warning: passes[0] gptq x: [damping] raised" in text


def test_a_line_per_tenth_where_there_is_no_terminal():
    file = io.StringIO()
    hear(Console(file=file, width=100, markup=False))
    lines = file.getvalue().splitlines()
    assert [line for line in lines if "gptq  " in line] == [
        *(f"model.layers.{i}  passes[0] gptq  {i}/40" for i in range(0, 40, 4)),
        "model.layers.39  passes[0] gptq  40/40",
    ]
    assert [line for line in lines if "gptq  " not in line] == [
        "perplexity of the base model  1/2",
        "warning: passes[0] gptq x: [damping] raised",
        "perplexity of the base model  2/2",
    ]


def test_blocks_are_complete_before_the_evaluation_begins():
    file, journal = io.StringIO(), Journal()
    with shown_progress(journal, Console(file=file, width=100, markup=False)):
        journal.add("progress", "gptq", "model.layers.2", block=2, blocks=3, step="gptq")
        journal.add("progress", "evaluate", "perplexity of the base model", done=2, of=2)
    assert file.getvalue().splitlines() == [
        "model.layers.2  gptq  2/3",
        "model.layers.2  gptq  3/3",
        "perplexity of the base model  2/2",
    ]


def test_a_run_that_fails_is_not_shown_as_complete():
    file, journal = io.StringIO(), Journal()
    with pytest.raises(RuntimeError), shown_progress(journal, Console(file=file, width=100, markup=False)):
        journal.add("progress", "evaluate", "perplexity", done=1, of=2)
        raise RuntimeError
    assert file.getvalue() == "perplexity  1/2\n"


def test_a_training_that_ended_early_is_not_shown_as_complete():
    file, journal = io.StringIO(), Journal()
    with shown_progress(journal, Console(file=file, width=100, markup=False)):
        journal.add("progress", "train", "training", done=30, of=100)
    assert file.getvalue() == "training  30/100\n"


def test_a_command_that_waits_shows_its_text_and_then_its_count():
    file = io.StringIO()
    with Waiting("opening x", Console(file=file, force_terminal=True, width=80, markup=False)) as waiting:
        assert "opening x" in file.getvalue() and "100%" not in file.getvalue()
        for done in range(1, 5):
            waiting.count(done, 4)
    end = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", file.getvalue()).splitlines()[-1]
    assert "opening x" in end and "4/4" in end


def test_a_command_that_waits_prints_counts_alone_where_there_is_no_terminal():
    file = io.StringIO()
    with Waiting("opening x", Console(file=file, width=80, markup=False)) as waiting:
        assert file.getvalue() == ""
        for done in range(1, 41):
            waiting.count(done, 40)
    lines = file.getvalue().splitlines()
    assert lines[0] == "opening x  1/40" and lines[-1] == "opening x  40/40" and len(lines) == 11


def test_run_shows_progress_unless_told_otherwise(recipe, tmp_path, capsys):
    asked = recipe(compress.RTN(group_size=32), eval=None, save={"verify": "own"})
    compress.run(asked, tmp_path / "a")
    assert "model.layers.0  passes[0] rtn  0/3" in " ".join(capsys.readouterr().err.split("\n"))
    compress.run(asked, tmp_path / "b", progress=False)
    assert capsys.readouterr().err == ""


def test_run_takes_a_path_and_has_the_default_folder_of_the_command(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = recipe(compress.RTN(group_size=32), eval=None, save={"verify": "own"})
    (tmp_path / "mine.yaml").write_text(asked.to_yaml())
    by_path = compress.run("mine.yaml", progress=False)
    by_value = compress.run(asked, progress=False)
    assert (by_path.folder, by_value.folder) == (Path("out/mine"), Path("out/model-rtn"))
    assert by_path.report["checkpoint_sha256"] == by_value.report["checkpoint_sha256"]
    assert by_value.report["perplexity"] is None and (by_value.folder / "report.md").exists()


def test_apply_takes_one_pass_and_what_recipes_spell(tiny, ids):
    one, listed, named = (tiny("llama") for _ in range(3))
    compress.apply(one, compress.RTN(group_size=16))
    compress.apply(listed, [compress.RTN(group_size=16)])
    compress.apply(named, [{"rtn": {"group_size": 16}}])
    name = "model.layers.0.mlp.up_proj"
    assert torch.equal(one.get_submodule(name).weight, listed.get_submodule(name).weight)
    assert torch.equal(one.get_submodule(name).weight, named.get_submodule(name).weight)
