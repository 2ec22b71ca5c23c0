"""`compress --help` groups the commands by task, and each example is a command line that exists."""

import shlex
from collections import Counter

import pytest
from click.testing import CliRunner

from compress.cli import main
from compress.cli.group import TASKS


def test_every_command_serves_one_task():
    assert Counter(name for task in TASKS.values() for name in task.commands) == Counter(list(main.commands))
    shown = CliRunner().invoke(main, ["--help"])
    assert shown.exit_code == 0 and [title for title in TASKS if f"\n{title}:\n" not in shown.output] == []
    assert "..." not in shown.output.partition("\n")[2]  # no summary is cut


@pytest.mark.parametrize("title", TASKS)
def test_the_example_of_a_task_is_one_of_its_commands(title):
    task = TASKS[title]
    program, name, *arguments = shlex.split(task.example)
    assert program == "compress" and name in task.commands
    options = {option for parameter in main.commands[name].params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("-")} <= options
