"""What maintainers rely on agrees with the project: workflows, hooks, classifiers and the mode of the type checker."""

import re
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHON = "Programming Language :: Python :: "
JOBS = ("check", "check"), ("docs", "build")


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))


def test_the_tests_run_with_every_supported_python_on_every_system():
    matrix = workflow("test")["jobs"]["test"]["strategy"]["matrix"]
    stated = [name.removeprefix(PYTHON) for name in PROJECT["project"]["classifiers"] if name.startswith(PYTHON)]
    assert matrix["python"] == stated and PROJECT["project"]["requires-python"] == f">={stated[0]}"
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    for page in ("README.md", "docs/tutorials/first-compression.md"):
        assert f"Python {stated[0]} to {stated[-1]}" in (ROOT / page).read_text(encoding="utf-8")


def test_the_workflows_call_the_commands_of_contributors():
    commands = {name: [step.get("run", "") for step in workflow(name)["jobs"][job]["steps"]] for name, job in JOBS}
    assert "make check" in commands["check"] and "make docs" in commands["docs"]
    wheels = workflow("release")["jobs"]["wheels"]
    assert any("pypa/cibuildwheel@" in step.get("uses", "") for step in wheels["steps"])
    assert {name.partition("-")[0] for name in wheels["strategy"]["matrix"]["os"]} == {"ubuntu", "macos", "windows"}


def test_the_hooks_before_a_commit_are_the_commands_of_make_check():
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = {hook["entry"] for hook in repository["hooks"]}
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    called = {line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()}
    folders = " compress docs eval notebooks tests"  # pre-commit passes the changed files of all folders
    assert hooks == {command.removesuffix(folders) for command in called}


def test_the_type_checker_is_in_standard_mode():
    settings = PROJECT["tool"]["pyright"]
    assert settings["typeCheckingMode"] == "standard" and settings["include"] == ["compress"]
    assert {name for name in settings if name.startswith("report")} == {"reportMissingTypeStubs"}


def test_warnings_are_errors_in_tests_with_listed_exceptions():
    first, *exceptions, last = PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert first == "error" and last == r"error:::compress(\..*)?$"
    assert all(line.startswith("ignore:") and line.count(":") > 1 for line in exceptions)
    assert [line for line in exceptions if line.startswith("ignore::") and "Warning:" in line] == []


def test_every_action_of_a_workflow_has_a_version_and_reads_only_what_it_needs():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        stated = workflow(path.stem)
        assert stated["permissions"] == {"contents": "read"}, path.name
        steps = [step for job in stated["jobs"].values() for step in job["steps"]]
        used = [step["uses"] for step in steps if "uses" in step]
        assert used and [use for use in used if not re.search(r"@(v\d+(\.\d+)*|release/v\d+|[0-9a-f]{40})$", use)] == []
        assert all(("uses" in step) != ("run" in step) for step in steps), path.name
