"""What comes from files is printed without commands for the terminal."""

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from compress.cli import main
from compress.cli.show import print_table, printable
from compress.recipe.tables import ResultTable

HOSTILE = "a\x1b[2J\x1b]0;title\x07b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ± text →", "plain ± text →"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        (HOSTILE, r"a\x1b[2J\x1b]0;title\x07b"),
        ("\x9b31m", r"\x9b31m"),  # the same command in one character of 8 bits
        ("\u202egnp", r"\u202egnp"),  # the text after it runs from right to left
    ],
)
def test_control_characters_are_spelled(text, shown):
    assert printable(text) == shown


def test_names_of_tensors_do_not_command_the_terminal(tmp_path):
    save_file({f"{HOSTILE}.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    done = CliRunner().invoke(main, ["inspect", "--all", str(tmp_path / "model.safetensors")], color=True)
    assert "title" in done.output.replace("\n", "") and "\x1b]" not in done.output and "\x07" not in done.output


def test_errors_do_not_command_the_terminal(tmp_path):
    done = CliRunner().invoke(main, ["inspect", f"{tmp_path}/{HOSTILE}"], color=True)
    assert done.exit_code == 2 and "\x1b" not in done.output and r"\x1b[2J" in done.output


def test_a_long_table_is_printed_as_columns(capsys):
    print_table(ResultTable("", ("module", "bytes"), [(f"layers.{i}\x1b", f"{i}") for i in range(20_000)]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20_001
    assert lines[0].split() == ["module", "bytes"] and lines[-1].split() == [r"layers.19999\x1b", "19999"]
