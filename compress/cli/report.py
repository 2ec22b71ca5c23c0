"""`compress report`: write report.md again from report.json, or print the JSON schema of report.json."""

from __future__ import annotations

from pathlib import Path

import click

from compress.cli.show import print_json, print_report


@click.command("report")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--schema", is_flag=True, help="Print the JSON schema of report.json.")
def report(folder: Path | None, schema: bool) -> None:
    """Write report.md of a run's FOLDER again from its report.json, and print the evidence."""
    from compress.report.schema import json_schema
    from compress.report.write import read_report, write_report

    if schema:
        print_json(json_schema())
        return
    if folder is None:
        raise click.UsageError("write the FOLDER of a run, or --schema")
    found = read_report(folder)
    write_report(found, folder)
    print_report(found.to_json(), folder)
