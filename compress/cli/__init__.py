"""The command line: parse, call, print. No logic, and nothing slow is imported before a command needs it."""

from compress.cli.bench import bench
from compress.cli.commands import main as main
from compress.cli.export import export

main.add_command(bench)
main.add_command(export)
