"""--json of every command that prints a table: one document with stable keys; and the exit codes."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import compress
import compress.errors
from compress import cli
from compress.cli.group import EXIT_CODES

ROOT = Path(__file__).parents[2]
LITTLE = [
    "--set",
    "calibration.sequences=4",
    "--set",
    "calibration.length=64",
    "--set",
    "eval.windows=2",
    "--set",
    "eval.length=64",
]
WINDOWS = ["--windows", 2, "--length", 32]
WITHOUT_TABLE = {"generate", "completion"}

REPORT = {
    "compress",
    "model",
    "size",
    "layers",
    "costs",
    "training",
    "predicted",
    "verified",
    "journal",
    "reproduce",
    "files",
    "checkpoint_sha256",
    "masked",
    "sensitivity",
    "perplexity",
    "tasks",
}
VARIANT = {
    "source",
    "size_bytes",
    "base_bytes",
    "text",
    "loss",
    "loss_stderr",
    "kl",
    "kl_stderr",
    "agreement",
    "tasks",
    "measure",
    "verdict",
}
SENSITIVITIES = {
    "compress",
    "model",
    "fingerprint",
    "text",
    "windows",
    "length",
    "level",
    "choices",
    "found",
    "passes",
}


def document(*args):
    """What a command prints with --json, parsed; it must be one document and nothing else."""
    done = CliRunner().invoke(cli.main, [*map(str, args), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def run(pico, tmp_path_factory):
    """(what `quantize --json` prints, its folder)."""
    out = tmp_path_factory.mktemp("json") / "out"
    return document("quantize", pico, "--scheme", "FP8-dynamic", "-o", out, *LITTLE), out


def test_every_command_with_a_table_has_json():
    flags = {name: {o for p in command.params for o in p.opts} for name, command in cli.main.commands.items()}
    assert [name for name, found in flags.items() if "--json" not in found] == sorted(
        WITHOUT_TABLE, key=list(flags).index
    )


def test_runs_print_report_json(run, pico, tmp_path):
    printed, out = run
    assert set(printed) >= REPORT and printed == json.loads((out / "report.json").read_text())
    assert document("report", out, "--no-open") == printed
    again = document("run", out / "recipe.yaml", "-o", out)
    assert set(again) == set(printed) and again["checkpoint_sha256"] == printed["checkpoint_sha256"]


def test_what_is_known_is_listed(run, pico):
    rows = document("passes")
    assert all(set(row) == {"name", "summary", "paper"} for row in rows) and len(rows) == len(compress.PASSES)
    page = document("passes", "wanda")
    assert set(page) == {
        "name",
        "summary",
        "text",
        "use_for",
        "cost",
        "not_for",
        "paper",
        "needs",
        "refuses",
        "makes",
        "options",
        "schemes",
        "measured",
        "protocol",
    }
    assert set(page["options"][0]) == {"name", "values", "default", "description", "own"}
    assert set(page["measured"][0]) == {
        "table",
        "name",
        "passes",
        "perplexity",
        "kl",
        "note",
        "seconds",
        "peak_mb",
        "bits",
        "mb",
        "by_position",
    }
    assert all(set(row) == {"name", "summary", "passes", "save"} for row in document("schemes"))
    devices = document("roofline", "--devices")
    fields = {"name", "rates", "bandwidth", "memory", "call_seconds", "kind", "other_names"}
    assert all(set(row) == fields for row in devices)


def test_models_are_measured_and_compared(run, pico, tmp_path):
    _, out = run
    assert set(document("plan", out / "recipe.yaml")) >= {
        "layers",
        "checkpoint_bytes",
        "dense_bytes",
        "memory_bytes",
        "memory",
        "notes",
    }
    found = document("eval", pico, out, "--work", tmp_path / "w", *WINDOWS)
    assert set(found) >= {"compress", "base", "settings", "models", "notes"} and len(found["models"]) == 2
    [variant] = document("compare", out)
    assert set(variant) == VARIANT
    assert set(document("roofline", pico, "--context", 64)) >= {"device", "batch", "context", "before", "after"}
    inspected = document("inspect", out)
    assert set(inspected) == {"source", "method", "files", "modules", "totals", "notes"}
    exported = document("export", out, "--format", "native", "-o", tmp_path / "native")
    assert set(exported) == {"folder", "format", "layers"}
    assert set(exported["layers"][0]) == {"name", "before", "after", "count", "error"}
    words = ["--choice", "int3", "--choice", "int4", "--bits", 4, "--windows", 2, "--length", 16]
    assert set(document("sensitivity", pico, *words, "--work", tmp_path / "s")) == SENSITIVITIES


@pytest.mark.slow
def test_speeds_are_a_document_too(pico):
    assert set(document("bench", pico)) == {"models", "instruction_set", "threads", "read_bandwidth"}


def test_roofline_without_a_subject_is_a_mistake():
    done = CliRunner().invoke(cli.main, ["roofline"])
    assert done.exit_code == 2 and "write a MODEL, FOLDER or RECIPE, or --devices" in done.stderr


def test_the_help_says_what_exit_codes_mean(pico):
    shown = " ".join(CliRunner().invoke(cli.main, ["--help"]).stdout.split())
    assert all(f"{code} {text}" in shown for code, text in EXIT_CODES.items())
    raised = {getattr(compress.errors, name).exit_code for name in dir(compress.errors) if name.endswith("Error")}
    assert raised | {0, click.UsageError.exit_code, 130} == set(EXIT_CODES)
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert all(f"| {code} | {meaning} |" in text for code, meaning in EXIT_CODES.items())
