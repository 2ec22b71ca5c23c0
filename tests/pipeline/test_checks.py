"""One list of checks: `plan` prints their notes, and `run` passes them before it starts."""

import inspect

import pytest

import compress
from compress.errors import TargetError
from compress.pipeline import checks, needs, notes, readers, servers


def test_every_function_that_checks_a_resolved_recipe_is_in_the_list():
    modules = (checks, needs, notes, readers, servers)
    functions = {f for module in modules for _, f in inspect.getmembers(module, inspect.isfunction)}
    of_checks = {f for f in functions if [*inspect.signature(f).parameters] == ["resolved", "facts"]}
    assert of_checks - {checks.check_all} == set(checks.CHECKS)
    assert len(checks.CHECKS) == len(set(checks.CHECKS)) > 8


def test_plan_and_run_pass_the_same_checks(recipe, monkeypatch, tmp_path):
    asked = recipe(compress.RTN(group_size=32), save={"format": "native"}, eval=None)
    monkeypatch.setattr(
        checks, "CHECKS", (*checks.CHECKS, lambda resolved, facts: [f"the first layer is {min(facts)}"])
    )
    assert any(text.startswith("the first layer is ") for text in compress.plan(asked).notes)
    journal = compress.run(asked, tmp_path / "out", progress=False).journal
    assert any(entry.where == "plan" and "the first layer is " in entry.message for entry in journal.entries)

    def refuse(resolved, facts):
        raise TargetError(f"{len(facts)} layers of {resolved.recipe.model} are refused")

    monkeypatch.setattr(checks, "CHECKS", (refuse,))
    for work in (compress.plan, lambda asked: compress.run(asked, tmp_path / "refused")):
        with pytest.raises(TargetError, match="^21 layers of .* are refused$"):
            work(asked)
    assert not (tmp_path / "refused").exists()
