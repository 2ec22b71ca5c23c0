"""Commands on a terminal of 80 columns and in a pipe: lines fit, no number is broken, and a pipe gets plain text."""

import inspect
import re

import pytest
from click.testing import CliRunner

from compress import cli

LITTLE = [f"--set={key}" for key in ("calibration.sequences=4", "calibration.length=64", "eval.windows=2")]
WINDOWS = ["--windows", 2, "--length", 32]
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
LONG_WORD = 40
"""The length of paths and digests, which are never divided."""


def printed(words, monkeypatch, columns):
    """The lines that a command prints. columns: of the terminal; None: a pipe, whose errors are plain text too."""
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    done = CliRunner().invoke(cli.main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert columns is not None or not {"\r", "\x1b"} & set(done.output)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def compressed(pico, tmp_path_factory):
    out = tmp_path_factory.mktemp("terminal") / "out"
    words = ["quantize", pico, "--scheme", "FP8-dynamic", "-o", out, *LITTLE, "--set=eval.length=64"]
    done = CliRunner().invoke(cli.main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return out


COMMANDS = {
    "plan": lambda pico, out, work: ["plan", out / "recipe.yaml"],
    "inspect": lambda pico, out, work: ["inspect", out],
    "compare": lambda pico, out, work: ["compare", out],
    "report": lambda pico, out, work: ["report", out, "--no-open"],
    "eval": lambda pico, out, work: ["eval", pico, out, "--work", work / "e", *WINDOWS],
    "roofline": lambda pico, out, work: ["roofline", out, "--context", 64],
    "devices": lambda pico, out, work: ["roofline", "--devices"],
    "sensitivity": lambda pico, out, work: [
        *["sensitivity", pico, "--choice", "int3", "--choice", "int4", "--bits", 4, "--work", work / "s"],
        *["--windows", 2, "--length", 16],
    ],
    "bench": lambda pico, out, work: ["bench", pico, "--against", out],
}
SLOW = {"bench"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in COMMANDS])
def test_a_command_fits_80_columns_and_keeps_its_numbers(name, compressed, pico, tmp_path, monkeypatch):
    words = COMMANDS[name](pico, compressed, tmp_path)
    piped, shown = printed(words, monkeypatch, None), printed(words, monkeypatch, 80)
    long = [line for line in shown if len(line) > 80 and max(map(len, line.split())) < LONG_WORD]
    assert long == []
    if name not in SLOW:  # measured anew: other numbers
        in_tables = [line for line in piped if line.startswith("│")]  # no cell is folded in a pipe
        numbers = set(NUMBER.findall("\n".join(in_tables)))
        assert numbers - set(NUMBER.findall("\n".join(shown))) == set()
    assert any(line.startswith(("│", "passes:")) for line in piped)


def test_no_arguments_and_help_print_the_commands_by_task(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    alone, helped = CliRunner().invoke(cli.main, []), CliRunner().invoke(cli.main, ["--help"])
    assert alone.output == helped.output and helped.exit_code == 0
    assert max(map(len, helped.output.splitlines())) <= 80
    for name in cli.main.commands:
        lines = CliRunner().invoke(cli.main, [name, "--help"]).output.splitlines()
        assert [line for line in lines if len(line) > 80 and max(map(len, line.split())) < LONG_WORD] == [], name


READS_NO_MODEL = {"recipes", "schemes", "passes", "completion", "report"}


def test_every_command_that_reads_a_model_shows_what_is_waited_for():
    silent = [
        name
        for name, command in cli.main.commands.items()
        if name not in READS_NO_MODEL
        and not re.search(r"Waiting\(|progress=True|run\(", inspect.getsource(inspect.getmodule(command.callback)))
    ]
    assert silent == []
