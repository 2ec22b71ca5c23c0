"""Sensitivities in the report: heat maps in report.html, rows in report.md, a picture for notebooks, files of another model."""

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from sample_report import BLOCKS, HOSTILE, KINDS, sample, sensitivity

from compress import cli
from compress.errors import RecipeError
from compress.recipe.sensitivities import FILE, Sensitivities
from compress.report.render import html
from compress.report.sections import SECTIONS
from compress.report.sensitivity import MeasuredSensitivities
from compress.report.write import ReportError, read_report, sensitivity_of, write_report
from compress.results.result import RunResult

FOUND = Sensitivities.model_validate(sensitivity("org/model"))


def test_the_section_has_a_map_for_each_choice_and_the_most_sensitive_layers():
    report = RunResult.from_json(sample())
    assert report.sensitivity == FOUND
    text = html(report)
    assert 'id="sensitivity"' in text
    markdown = SECTIONS["sensitivity"]().render(report)
    worst = max(FOUND.found, key=lambda one: one.kl)
    assert markdown.splitlines()[4].startswith(f"| {worst.name} | {worst.choice} |")
    without = RunResult.from_json(sample() | {"sensitivity": None})
    chart = '<figure class="chart">'
    assert text.count(chart) - html(without).count(chart) == len(FOUND.choices) == 2
    assert 'id="sensitivity"' not in html(without) and SECTIONS["sensitivity"]().render(without) is None


def test_a_file_in_the_folder_becomes_part_of_the_report(tmp_path):
    report = RunResult.from_json(sample() | {"sensitivity": None})
    write_report(report, tmp_path)
    assert read_report(tmp_path).sensitivity is None
    (tmp_path / FILE).write_text(FOUND.model_dump_json())
    done = CliRunner().invoke(cli.main, ["report", str(tmp_path), "--no-open", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["compress"] == "1.2.3"
    assert read_report(tmp_path).sensitivity == FOUND
    assert 'id="sensitivity"' in (tmp_path / "report.html").read_text()


def test_files_of_another_model_and_others_are_errors(tmp_path):
    assert sensitivity_of(tmp_path, "f") is None
    (tmp_path / FILE).write_text(FOUND.model_copy(update={"fingerprint": "x"}).model_dump_json())
    with pytest.raises(
        ReportError, match=r"measured on org/model, which is another model; measure this one, or remove"
    ):
        sensitivity_of(tmp_path, FOUND.fingerprint)
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(RecipeError, match="no readable sensitivities"):
        write_report(RunResult.from_json(sample()), tmp_path)


def test_the_picture_is_an_svg_with_a_cell_for_each_value_and_escapes_names():
    drawn = MeasuredSensitivities.model_validate(sensitivity("org/model")).picture()
    root = ElementTree.fromstring(str(drawn))
    titles = [title.text for title in root.findall(".//{*}title")][1:]
    assert len(titles) == 2 * BLOCKS * len(KINDS)
    assert titles[0].startswith(f"{KINDS[0]}, block 0: ") and drawn._repr_svg_() == str(drawn)  # a notebook asks for it
    hostile = json.loads(FOUND.model_dump_json().replace("q_proj", HOSTILE))
    assert HOSTILE not in str(MeasuredSensitivities.model_validate(hostile).picture())
