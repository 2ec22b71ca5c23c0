"""The command line: parse, call, print. No logic, and nothing slow is imported before a command needs it."""

from compress.cli.bench import bench
from compress.cli.commands import main as main

main.add_command(bench)
