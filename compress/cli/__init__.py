"""The command line: parse, call, print. No logic, and nothing slow is imported before a command needs it."""

from compress.cli.commands import main as main
from compress.cli.compare import compare
from compress.cli.eval import evaluate
from compress.cli.report import report

for command in (evaluate, compare, report):
    main.add_command(command)
