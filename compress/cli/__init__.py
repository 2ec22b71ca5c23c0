"""The command line: parse, call, print. No logic, and nothing slow is imported before a command needs it."""

from compress.cli.commands import main as main
from compress.cli.inspect import inspect

main.add_command(inspect)
