"""The command line: what it prints, its exit codes, one line for a mistake, a bar on a terminal, Ctrl-C and again."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from rich.console import Console

import compress
from compress import cli
from compress.api.journal import Entry
from compress.errors import NumericError
from compress.passes import PASSES
from compress.recipe.schema import DType

RTN = "- rtn: {group_size: 32}"


@pytest.fixture
def spell(pico, texts, tmp_path):
    """spell(passes in YAML, **top-level keys) -> a recipe file for the pico model."""

    def write(passes: str = RTN, **more: str) -> str:
        keys = {
            "model": pico,
            "calibration": f"{{source: {texts['calibration']}, sequences: null, length: null}}",
            "eval": f"{{perplexity: [{texts['test']}], windows: 2, length: null}}",
            "save": "{verify: own}",
            **more,
        }
        lines = [f"{key}: {value}" for key, value in keys.items()]
        path = tmp_path / "r.yaml"
        path.write_text("\n".join([*lines, "passes:", *("  " + p for p in passes.splitlines())]) + "\n")
        return str(path)

    return write


def call(*args):
    """compress ARGS; returns click's result, whose stdout and stderr are apart."""
    return CliRunner().invoke(cli.main, [str(a) for a in args])


# ---- the commands ----


def test_run_prints_the_evidence(spell, tmp_path):
    out = tmp_path / "out"
    done = call("run", spell(), "--out", out)
    assert done.exit_code == 0, done.output
    report = json.loads((out / "report.json").read_text())
    text = " ".join(done.stdout.split())
    assert f"checkpoint sha256: {report['checkpoint_sha256']}" in text and "report.md" in text
    assert "codes of 21 layers read back bit for bit" in text
    assert f"{report['perplexity'][0]['compressed']['perplexity']:.2f}" in text
    assert "model.layers.0 passes[0] rtn 0/3" in " ".join(done.stderr.split())  # no terminal: plain lines
    assert "\x1b" not in done.output


def test_without_out_the_folder_is_named_after_the_recipe(spell, tmp_path, monkeypatch):
    path = spell()
    monkeypatch.chdir(tmp_path)
    assert call("run", path).exit_code == 0
    assert (tmp_path / "out" / "r" / "config.json").exists()


def test_the_model_can_be_overridden(spell, tiny_folder, texts, tmp_path):
    texts_of_tiny = {
        "calibration": f"{{source: {texts['tiny']}, sequences: null, length: null}}",
        "eval": f"{{perplexity: [{texts['tiny']}], windows: 2, length: null}}",
    }
    path, other = spell("- rtn: {group_size: 16}", **texts_of_tiny), tiny_folder("llama")
    assert "32 x 32" in call("plan", path, "--model", other).stdout
    assert call("run", path, "--model", other, "-o", tmp_path / "out").exit_code == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["model"]["source"] == report["reproduce"]["recipe"]["model"] == other
    wrong = call("plan", path, "--model", "/no/such")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1) and "no folder /no/such" in wrong.stderr


def test_plan_lists_every_module_and_writes_nothing(spell, tmp_path):
    path = spell("- rtn: {group_size: 32, targets: '*.mlp.*'}")
    before = sorted(tmp_path.iterdir())
    done = call("plan", path)
    planned = compress.plan(compress.Recipe.from_yaml(path))
    text = "".join(done.stdout.replace("│", " ").split())
    assert done.exit_code == 0 and sorted(tmp_path.iterdir()) == before
    assert f"checkpoint:{planned.checkpoint_bytes}bytesoftensors({planned.dense_bytes}dense)" in text
    assert text.count("passes[0]rtn") == 9 and text.count("unchanged") == 12


def test_eval_agrees_with_the_report(spell, texts, tmp_path):
    out = tmp_path / "out"
    assert call("run", spell(), "--out", out).exit_code == 0
    report = json.loads((out / "report.json").read_text())
    done = call("eval", out, "--text", texts["test"], "--windows", 2, "--length", 64)
    assert done.exit_code == 0
    assert f"{report['perplexity'][0]['compressed']['perplexity']:.4f}" in done.stdout and "next tokens" in done.stdout


def test_passes_lists_every_pass_with_every_option():
    done = call("passes")
    assert done.exit_code == 0
    for key, step in PASSES.items():
        assert f"{key}: " in done.stdout and step.paper in done.stdout
        assert all(f"    {name} = " in done.stdout for name in step.model_fields)


def test_version_and_help():
    assert compress.__version__ in call("--version").stdout
    for command in ("run", "plan", "eval", "passes"):
        assert call(command, "--help").exit_code == 0 and command in call("--help").stdout


# ---- what goes wrong ----


def fails(result, code: int, message: str):
    """One line on standard error, nothing on standard output."""
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert message in result.stderr


def test_a_mistake_is_one_line_and_exit_code_2(spell):
    fails(call("run", spell("- rtn: {group_sise: 3}")), 2, "r.yaml:6:11: passes[0] rtn group_sise: unknown option")
    fails(call("plan", "none.yaml"), 2, "none.yaml: cannot be read")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NumericError("model.layers.1: NaN"), 1, "model.layers.1: NaN"),
        (compress.CompressError("one\n  two"), 1, "error: one two"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command again to resume"),
    ],
)
def test_a_failure_is_one_line_and_its_exit_code(error, code, message, spell, monkeypatch):
    def fail(*_):
        raise error

    path = spell()
    monkeypatch.setattr("compress.pipeline.run.run", fail)
    result = call("run", path)
    result_line = result.stderr.lstrip("\n")  # click ends the line of ^C
    assert (result.exit_code, result.stdout, result_line.count("\n")) == (code, "", 1)
    assert message in result_line
    for place in (["--debug", "run", path], ["run", path, "--debug"]):
        shown = call(*place)
        assert shown.exit_code == code
        assert "Traceback (most recent call last)" in shown.stderr and type(error).__name__ in shown.stderr


def test_a_bug_is_one_line_with_its_type_and_a_request_to_report_it(spell, monkeypatch, tmp_path):
    def solve(*_):
        raise ZeroDivisionError("division\n by zero")

    path, out = spell(), tmp_path / "out"
    monkeypatch.setattr(PASSES["rtn"], "solve", solve)
    result = call("run", path, "--out", out)
    line = result.stderr.splitlines()[-1]
    assert (result.exit_code, result.stdout) == (1, "") and "Traceback" not in result.stderr
    assert line.startswith("error: unexpected ZeroDivisionError: division by zero; ")
    assert "--debug" in line and "report it as a bug" in line
    shown = call("--debug", "run", path, "--out", out)
    assert shown.exit_code == 1 and "Traceback (most recent call last)" in shown.stderr and "in solve" in shown.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["run"], "Missing argument 'RECIPE'"),
        (["run", "a.yaml", "--ot", "x"], "No such option"),
        (["eval", "x", "--windows", "0"], "Invalid value for '--windows'"),
        (["eval", "x", "--length", "1"], "Invalid value for '--length'"),
    ],
)
def test_commands_that_are_none(args, message):
    result = call(*args)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dtype", "float23"], "dtype 'float23' is not known; did you mean 'float32'?"),
        (["--text", "embeded"], "unknown source 'embeded'; did you mean 'embedded'"),
        (["--text", "none.txt"], "cannot read none.txt"),
        (["--length", "513"], "length 513 exceeds the model's 512 positions"),
    ],
)
def test_what_eval_cannot_do(args, message, pico):
    fails(call("eval", pico, *args), 2, message)


def test_eval_checks_ids_against_the_vocabulary_and_the_tokenizer(tiny_folder, texts):
    narrow = ["--windows", 2, "--length", 24]
    fails(call("eval", tiny_folder("llama"), "--text", texts["test"], *narrow), 2, "the model's vocabulary has 64")
    fails(call("eval", tiny_folder("llama")), 2, "the model has no tokenizer; use token ids in a .npy file")


def test_every_dtype_of_a_recipe_can_be_evaluated_in(pico, texts):
    for dtype in get_args(DType):
        done = call("eval", pico, "--dtype", dtype, "--text", texts["test"], "--windows", 1, "--length", 16)
        assert done.exit_code == 0, done.stderr


# ---- progress ----


def hear(console: Console) -> None:
    with cli._Bar(console) as bar:
        for block in range(40):
            figures = {"block": block, "blocks": 40, "step": "passes[0] gptq"}
            bar(Entry("progress", "passes[0] gptq", f"model.layers.{block}", figures))
        bar(Entry("progress", "evaluate", "perplexity of the base model", {"done": 1, "of": 2}))
        bar(Entry("fallback", "passes[0] gptq x", "[damping] raised"))
        bar(Entry("note", "model", "not shown while it runs"))


def test_a_bar_on_a_terminal():
    file = io.StringIO()
    hear(Console(file=file, force_terminal=True, width=100, markup=False))
    assert "\x1b[" in file.getvalue() and "━" in file.getvalue()
    text = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", file.getvalue())
    assert "model.layers.39  passes[0] gptq" in text and "39/40" in text
    assert "fallback: passes[0] gptq x: [damping] raised" in text


def test_a_line_per_tenth_where_there_is_no_terminal():
    file = io.StringIO()
    hear(Console(file=file, width=100, markup=False))
    lines = file.getvalue().splitlines()
    assert [line for line in lines if "gptq  " in line] == [
        f"model.layers.{i}  passes[0] gptq  {i}/40" for i in range(0, 40, 4)
    ]
    assert lines[-2:] == ["perplexity of the base model  1/2", "fallback: passes[0] gptq x: [damping] raised"]


def test_ctrl_c_that_a_library_swallows_ends_the_run_at_its_next_step(spell, monkeypatch):
    before, steps = signal.getsignal(signal.SIGINT), []

    def run(recipe, folder, overwrite, journal):
        with suppress(KeyboardInterrupt):  # as where an exception in a callback is printed and forgotten
            signal.raise_signal(signal.SIGINT)
        for step in range(3):
            steps.append(step)
            journal.add("progress", "x", "working", done=step, of=3)

    path = spell()
    monkeypatch.setattr("compress.pipeline.run.run", run)
    result = call("run", path)
    assert result.exit_code == 130 and "interrupted; run the same command again" in result.stderr
    assert steps == [0] and signal.getsignal(signal.SIGINT) is before


# ---- real processes ----


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_on_a_terminal_and_the_same_command_again(spell, tmp_path):
    import fcntl
    import pty
    import termios

    slow = "{source: embedded, sequences: 24, length: 512}"  # half a second per block
    path, out = spell("- gptq: {group_size: 32}", calibration=slow), tmp_path / "out"
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "compress", "run", path, "--out", str(out)],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    shown, pressed, manifest = b"", False, out / ".compress" / "manifest.json"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            shown += os.read(master, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not pressed and manifest.exists() and b"model.layers.0" in manifest.read_bytes():
            os.write(master, b"\x03")
            pressed = True
    os.close(master)
    assert process.wait(timeout=30) == 130, shown.decode()
    text = shown.decode()
    assert "━" in text and "\x1b[" in text  # the bar
    assert "error: interrupted; run the same command again to resume" in text and "Traceback" not in text
    assert not (out / "config.json").exists() and not list(out.glob("*.part"))
    done = {p: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
    assert 1 <= len(done) < 4
    again = call("run", path, "--out", out)
    assert again.exit_code == 0 and (out / "report.json").exists()
    assert "model.layers.0  restored" in again.stderr
    assert {p: p.stat().st_mtime_ns for p in done} == done


def test_help_does_not_import_torch():
    code = "import sys, compress.cli as c\ntry: c.main(['run', '--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (done.returncode, done.stderr) == (0, "") and "Output folder" in done.stdout
