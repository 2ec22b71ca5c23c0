"""Outputs of commands: they are tried before any work, and results are printed even if writing them fails."""

import errno
import json

import click
import pytest
from click.testing import CliRunner

import compress
from compress import RTN, cli
from compress.cli.paths import UserPath
from compress.cli.show import print_report
from compress.errors import OutputError, SaveError
from compress.pipeline import models, plan, sensitivity, starting, timing


def call(*args):
    """compress ARGS; returns click's result, whose stdout and stderr are apart."""
    return CliRunner().invoke(cli.main, [str(a) for a in args])


WINDOWS = "--windows", "2", "--length", "32"
COMMANDS = {
    "eval": (("eval", "MODEL", *WINDOWS), ".json"),
    "compare": (("compare", "MODEL", "--base", "MODEL/", *WINDOWS), ".svg or .html"),
    "sensitivity": (("sensitivity", "MODEL", "--choice", "int4", "--by", "block", *WINDOWS), ".json or .html"),
    "init": (("init", "MODEL"), ".yaml or .yml"),
}
WORKERS = ((models, "load"), (sensitivity, "load"), (starting, "plan"))
"""What the commands do first of their work."""


@pytest.fixture
def no_work(monkeypatch):
    """Every command fails where its work starts."""

    def work(*args, **kwargs):
        raise AssertionError("the command worked before it tried its output")

    for module, name in WORKERS:
        monkeypatch.setattr(module, name, work)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("results.png", "results are written to a file that ends in {endings}; write such a name"),
        ("missing/results{ending}", "there is no folder"),
        ("file/results{ending}", "there is no folder"),
        ("folder", "is a folder; write the name of a file"),
        ("/proc/results{ending}", "cannot be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(command, name, message, pico, tmp_path, no_work):
    args, endings = COMMANDS[command]
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    path = tmp_path / name.format(ending=endings.split()[0])
    done = call(*(arg.replace("MODEL", pico) for arg in args), "-o", path)
    assert done.exit_code == 2, done.output
    assert f"{path}: {message.format(endings=endings)}" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("command", ["eval", "compare", "sensitivity"])
def test_a_folder_of_kept_results_is_tried_too(command, pico, no_work):
    done = call(*(arg.replace("MODEL", pico) for arg in COMMANDS[command][0]), "--work", "/proc/kept")
    assert done.exit_code == 2 and "/proc/kept: cannot be written" in done.stderr


@pytest.mark.parametrize("place", ["/proc/out", "{file}/out"])
def test_an_output_folder_is_tried_before_the_model_is_opened(place, recipe, pico, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    out = place.format(file=tmp_path / "file")
    rtn = recipe(RTN(group_size=32), model=str(tmp_path / "no model"))
    for work in (
        lambda: compress.run(rtn, out, progress=False),
        lambda: compress.plan(rtn, out),
        lambda: compress.export(tmp_path / "no model", out),
    ):
        with pytest.raises(OutputError, match="cannot be written"):
            work()


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model.onnx"])
@pytest.mark.parametrize("command", ["quantize", "prune", "run", "sweep", "export", "model-free"])
def test_a_folder_is_not_named_like_a_file_of_a_model(command, name, recipe, pico, tmp_path):
    if command == "sweep":
        pytest.importorskip("ray")
    (tmp_path / "recipe.yaml").write_text(recipe(RTN(group_size=32), eval=None).to_yaml())
    args = {
        "quantize": ("quantize", pico, "--scheme", "W4A16"),
        "prune": ("prune", pico),
        "run": ("run", tmp_path / "recipe.yaml"),
        "sweep": ("sweep", tmp_path / "recipe.yaml", "--over", "rtn.group_size=16,32"),
        "export": ("export", pico, "--format", "gguf"),
        "model-free": ("quantize", pico, "--scheme", "W8A16", "--model-free"),
    }[command]
    done = call(*args, "-o", tmp_path / name)
    assert done.exit_code == 2 and f"write the name of a folder, such as {tmp_path / 'model'}" in " ".join(
        done.stderr.split()
    ), done.output
    assert not (tmp_path / name).exists()


def test_an_export_of_a_model_without_compressed_layers_shows_no_empty_table(pico, tmp_path):
    done = call("export", pico, "--format", "gguf", "-o", tmp_path / "out")
    assert done.exit_code == 0 and "weight error" not in done.stdout and "checkpoint: " in done.stdout


def test_a_trial_is_made_only_where_it_can_be_kept(recipe, monkeypatch):
    monkeypatch.setattr(timing, "kept_file", lambda resolved: timing.Path("/proc/kept/trial.json"))
    monkeypatch.setattr(timing, "trial", lambda *args: pytest.fail("the trial was made first"))
    with pytest.raises(OutputError, match="/proc/kept: cannot be written"):
        plan.plan(recipe(RTN(group_size=32)), time=True)


@pytest.mark.parametrize(("command", "word"), [("eval", "perplexity"), ("compare", "smaller"), ("sensitivity", "int4")])
def test_results_are_printed_if_writing_them_fails(command, word, pico, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, endings = COMMANDS[command]

    def full(path, text):
        raise SaveError(f"{path}: the disk is full")

    for module in ("compress.checkpoint.containers.files", "compress.report.sensitivity"):
        monkeypatch.setattr(f"{module}.write_text", full)
    done = call(*(arg.replace("MODEL", pico) for arg in args), "-o", f"results{endings.split()[0]}")
    assert done.exit_code == 1 and "the disk is full" in done.stderr and word in done.stdout


def test_the_evidence_of_a_run_is_printed_if_its_report_cannot_be_written(recipe, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("compress.pipeline.finish.write_report", full)
    received = []
    with pytest.raises(SaveError, match="the disk is full"):
        compress.run(recipe(RTN(group_size=32)), tmp_path / "out", progress=False, on_failure=received.append)
    assert json.loads(json.dumps(received[0]))["perplexity"]
    print_report(received[0], tmp_path / "out")
    assert "report.html" not in capsys.readouterr().out


@pytest.mark.parametrize("args", [("MODEL", "--base", "MODEL"), ("MODEL", "--measure")])
def test_a_comparison_needs_another_model(args, pico, no_work):
    done = call("compare", *(arg.replace("MODEL", pico) for arg in args))
    assert done.exit_code == 2 and "name another MODEL too" in done.stderr


def test_every_path_of_the_command_line_may_begin_with_the_home_folder():
    paths = [
        f"{name} {param.name}"
        for name, command in cli.main.commands.items()
        for param in command.params
        if isinstance(param.type, click.Path) and not isinstance(param.type, UserPath)
    ]
    assert not paths


def test_outputs_below_the_home_folder(recipe, pico, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert compress.run(recipe(RTN(), eval=None), "~/out put", progress=False).folder == tmp_path / "home" / "out put"
    compress.plan(recipe(RTN(), eval=None), "~/out put")
    compress.export("~/out put", "~/native")
    model, _ = compress.load("~/native")
    compress.save(model, "~/saved")
    assert call("inspect", "~/saved").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["native", "out put", "saved"]
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("work", [compress.run, compress.plan])
def test_a_name_that_no_disk_can_hold(work, recipe, tmp_path):
    with pytest.raises(
        OutputError, match=r"xx: cannot be created or read \(File name too long\); choose another folder"
    ):
        work(recipe(RTN(), eval=None), tmp_path / ("x" * 300))
