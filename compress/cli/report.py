"""`compress report`: write report.md and report.html again from report.json, or print the schema of report.json."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

import click

from compress.cli.paths import UserPath
from compress.cli.show import echo, print_json, print_report


@click.command("report")
@click.argument("folder", required=False, type=UserPath())
@click.option(
    "--open/--no-open", "shown", default=None, help="Open report.html in the browser.  [default: on a terminal]"
)
@click.option("--schema", is_flag=True, help="Print the JSON schema of report.json.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json.")
def report(folder: Path | None, shown: bool | None, schema: bool, as_json: bool) -> None:
    """Write report.md and report.html of a run's FOLDER again from its report.json, and print the evidence."""
    from compress.pipeline.output import record_rewritten
    from compress.report.write import PAGE, read_report, write_report
    from compress.results.result import json_schema

    if schema:
        print_json(json_schema())
        return
    if folder is None:
        raise click.UsageError("write the FOLDER of a run, or --schema")
    result = read_report(folder)
    print_json(result.to_json()) if as_json else print_report(result.to_json(), folder)
    record_rewritten(folder, write_report(result, folder))
    page = (folder / PAGE).resolve()
    if (sys.stdout.isatty() if shown is None else shown) and not webbrowser.open(page.as_uri()):
        echo(f"note: no browser was found; open {page}", err=as_json)
