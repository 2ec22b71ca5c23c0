"""The command line: parse, call, print. No logic, and nothing slow is imported before a command needs it."""

from compress.cli.bench import bench
from compress.cli.commands import main as main
from compress.cli.compare import compare
from compress.cli.completion import completion
from compress.cli.eval import evaluate
from compress.cli.export import export
from compress.cli.generate import generate
from compress.cli.imatrix import imatrix
from compress.cli.init import init
from compress.cli.inspect import inspect
from compress.cli.passes import passes, recipes, schemes
from compress.cli.report import report
from compress.cli.roofline import roofline
from compress.cli.sensitivity import sensitivity
from compress.cli.sweep import sweep

for command in (
    bench,
    compare,
    completion,
    evaluate,
    export,
    generate,
    init,
    inspect,
    passes,
    recipes,
    report,
    roofline,
    schemes,
    sensitivity,
    imatrix,
    sweep,
):
    main.add_command(command)
