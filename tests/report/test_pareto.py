"""`compress compare`: the front by hand, tables from reports, measured now, and reports that do not fit."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

import compress
from compress.cli import main
from compress.report.pareto import Variant, Variants, from_report, verdict


def variant(source, size, loss, stderr=0.01, text="a text"):
    return Variant(source=source, size_bytes=size, base_bytes=1000, text=text, loss=loss, loss_stderr=stderr)


def test_the_front_by_hand():
    made = [variant("a", 100, 0.5), variant("b", 200, 0.2), variant("c", 150, 0.6), variant("d", 300, 0.2)]
    assert Variants(made).on_front() == [True, True, False, False]
    assert Variants(made[:1]).on_front() == [True]
    assert Variants([variant("x", 1, 1), variant("y", 1, 1)]).on_front() == [True, True]
    assert [row[0] for row in Variants(made).table().rows] == ["d", "b", "c", "a"]
    assert repr(Variants(made)).splitlines()[2].split() == ["d", "0.000300", "3.33x", "+0.2000", "±", "0.0100"]


def test_the_verdict_in_words():
    measured = variant("a", 100, 0.1).model_copy(update={"verdict": "loss +0.1000 ± 0.0100 nats per token: worse"})
    assert verdict(measured) == "10.00x smaller; loss +0.1000 ± 0.0100 nats per token: worse"
    distance = variant("a", 100, 0.1).model_copy(update={"measure": "1 - cosine"})
    assert verdict(distance) == "10.00x smaller; 1 - cosine 0.1000 ± 0.0100"


def test_the_picture_escapes_names_and_is_xml():
    text = str(Variants([variant("<script>alert(1)", 100, 0.5, text="<b>"), variant("b", 200, 0.2)]).picture())
    drawn = ElementTree.fromstring(text)
    assert len(drawn.findall(".//{*}title")) == 1 + 2 and "<script>" not in text and "&lt;script&gt;" in text


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """Two runs of the same model."""
    root = tmp_path_factory.mktemp("compare")
    for name, bits in (("large", "int8"), ("small", "int2")):
        compress.run(recipe(compress.RTN(weights=bits, group_size=32)), root / name, progress=False)
    return root


def call(*args):
    return CliRunner().invoke(main, ["compare", *map(str, args)])


def test_tables_from_reports(finished, tmp_path):
    done = call(finished / "large", finished / "small", "-o", tmp_path / "plot.svg")
    assert done.exit_code == 0, done.output
    assert call(finished / "large", finished / "small", "-o", tmp_path / "plot.html").exit_code == 0
    page = (tmp_path / "plot.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<g><title>") == 2 and "undecided (2 windows" in page
    assert "undecided (2 windows of text; measure 8 or more)" in " ".join(done.stdout.split())
    assert len(ElementTree.parse(tmp_path / "plot.svg").findall(".//{*}title")) == 1 + 2
    large, small = json.loads(call(finished / "large", finished / "small", "--json").stdout)
    assert large["size_bytes"] > small["size_bytes"] and large["kl"] < small["kl"] and large["loss"] < small["loss"]
    report = json.loads((finished / "small" / "report.json").read_text())
    assert small["loss"] == report["perplexity"][0]["difference"]["loss"]


def test_measured_now_they_agree_with_the_reports(finished, pico, texts, tmp_path):
    args = ["--base", pico, "--text", texts["test"], "--windows", 2, "--length", 64, "--work", tmp_path / "work"]
    done = call(finished / "small", *args, "--json")
    assert done.exit_code == 0, done.output
    [found] = json.loads(done.stdout)
    stored = from_report(finished / "small")
    assert found["loss"] == pytest.approx(stored.loss, rel=1e-4) and found["kl"] == pytest.approx(stored.kl, rel=1e-3)


def test_reports_that_do_not_fit(finished, tmp_path):
    missing = call(tmp_path)
    assert (
        missing.exit_code == 2 and "no readable report" in missing.stderr and "name the output folder" in missing.stderr
    )
    values = json.loads((finished / "small" / "report.json").read_text())
    values["perplexity"][0]["sha256"] = "0" * 64
    (tmp_path / "report.json").write_text(json.dumps(values))
    other = call(finished / "small", tmp_path)
    assert other.exit_code == 2 and "its text is" in other.stderr and "--measure --base MODEL" in other.stderr
    values["perplexity"] = []
    (tmp_path / "report.json").write_text(json.dumps(values))
    assert "has no paired loss on a text" in call(tmp_path).stderr


def test_without_a_base_nothing_is_compared(finished, texts, tmp_path):
    args = ["--measure", "--text", texts["test"], "--windows", 1, "--length", 32, "--work", str(tmp_path / "w")]
    done = call(finished / "small", *args)
    assert done.exit_code == 2 and "nothing is compared with the base; name another MODEL too" in done.stderr
    assert Variants.from_reports([Path(finished / "small")]).models[0].base_bytes > 0
