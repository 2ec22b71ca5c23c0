"""An evaluator is one file and a section is one file: a run finds both without another change."""

import importlib
import json
import sys
from pathlib import Path

import pytest

import compress
from compress import evaluation
from compress.evaluation import EVALUATORS
from compress.evaluation.base import Evaluator
from compress.passes.contract.discovery import classes_by_file
from compress.report import sections
from compress.report.sections import SECTIONS
from compress.report.sections.base import Section
from compress.results import measurements
from compress.results.measurements import MEASUREMENTS
from compress.results.measurements.base import Measurement

EVALUATOR = '''
"""Number of tensors of a model, and of parameters in them."""

from __future__ import annotations

from compress.evaluation.base import Evaluator


class ToyCount(Evaluator):
    """Counts."""

    needs_base = True
    dtypes: bool = False

    def measure(self, model, context):
        return {"tensors": len(model.state_dict()), "which": context.role, "texts": sorted(context.texts)}
'''

MEASUREMENT = '''
"""Number of tensors, in tables."""

from __future__ import annotations

from compress.results.measurements.base import Measurement


class ToyCountMeasurement(Measurement):
    """Counts."""

    @classmethod
    def summary(cls, value):
        return [("tensors", str(value["base"]["tensors"]), str(value["compressed"]["tensors"]), "")]
'''

SECTION = '''
"""Section: the counts."""

from compress.report.sections.base import Section


class ToyTextSection(Section):
    """One line."""

    title = "Tensors"
    order = 35

    def render(self, report):
        found = report.evaluations["toy_count"]
        return f"{found['compressed']['tensors']} after {found['base']['tensors']}."
'''


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """A file in the folder of the evaluators, and one in the folder of the sections."""
    for package, name, text, known, base, suffix in (
        (evaluation, "toy_count", EVALUATOR, EVALUATORS, Evaluator, ""),
        (measurements, "toy_count", MEASUREMENT, MEASUREMENTS, Measurement, "Measurement"),
        (sections, "toy_text", SECTION, SECTIONS, Section, "Section"),
    ):
        folder = tmp_path / package.__name__ / name
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        found = classes_by_file(package.__name__, package.__path__, base, suffix)
        assert found.keys() - known.keys() == {name}
        monkeypatch.setitem(known, name, found[name])
    yield
    for name in (
        "compress.evaluation.toy_count",
        "compress.results.measurements.toy_count",
        "compress.report.sections.toy_text",
    ):
        sys.modules.pop(name)


def test_a_run_finds_an_evaluator_and_a_section_by_their_files(toys, recipe, tmp_path):
    asked = recipe(compress.RTN(group_size=32), save={"format": "native"})
    result = compress.run(asked, tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    found = stored["toy_count"]
    assert found == result.report["toy_count"]
    assert (found["base"]["which"], found["compressed"]["which"]) == ("base", "compressed")
    assert found["compressed"]["tensors"] > found["base"]["tensors"]  # codes and scales
    assert found["base"]["texts"] == [Path(text).name for text in asked.eval.perplexity]
    page = (tmp_path / "out" / "report.md").read_text()
    counts = found["base"]["tensors"], found["compressed"]["tensors"]
    assert f"| tensors | {counts[0]} | {counts[1]} |  |" in page
    section = f"## Tensors\n\n{counts[1]} after {counts[0]}.\n"
    assert page.index("## Checks") < page.index(section) < page.index("## Relative output error")


@pytest.mark.parametrize("key", SECTIONS)
def test_every_section_has_a_title_and_a_place_of_its_own(key):
    assert SECTIONS[key].__module__ == f"compress.report.sections.{key}"
    assert [kind for kind in SECTIONS.values() if kind.title == SECTIONS[key].title] == [SECTIONS[key]]
    assert [kind for kind in SECTIONS.values() if kind.order == SECTIONS[key].order] == [SECTIONS[key]]
