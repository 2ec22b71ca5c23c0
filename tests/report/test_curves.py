"""Curves by hand: as text, as charts, and what is in neither."""

import json

import compress
from compress.report.charts import picture
from compress.report.curves import charts_of, series, spark, sparks, training_charts
from compress.results.result import RunResult

CURVE = [
    {"step": 0, "sparsity": 0.0},
    {"step": 0, "held_out": 4.0},
    {"step": 1, "loss": 8.0, "rate": 0.5, "sparsity": 0.25, "flips": 0.125},
    {"step": 2, "loss": 1.0, "rate": 1.0, "sparsity": 0.5, "flips": 0.0},
    {"step": 2, "held_out": 2.0},
]


def test_series_by_hand():
    assert series(CURVE) == {
        "sparsity": [(0, 0.0), (1, 0.25), (2, 0.5)],
        "held out": [(0, 4.0), (2, 2.0)],
        "loss": [(1, 8.0), (2, 1.0)],
        "mask flips": [(1, 0.125), (2, 0.0)],
    }


def test_lines_of_text_by_hand():
    assert spark([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert spark([3.0]) == "▁" and spark([2.0, 2.0]) == "▁▁"
    assert spark([0.0] * 480 + [1.0] * 480) == "▁" * 24 + "█" * 24
    assert sparks({"one": CURVE}).splitlines() == [
        "one",
        "  sparsity           0 ▁▅█ 0.5",
        "  held out           4 █▁ 2",
        "  loss               8 █▁ 1",
        "  mask flips     0.125 █▁ 0",
    ]


def test_charts_of_a_pass():
    loss, sparsity, flips = charts_of("a", CURVE)
    assert [(line.name, line.is_base) for line in loss.lines] == [("loss", False), ("held out", True)]
    assert [chart.title for chart in (loss, sparsity, flips)] == ["a, loss", "a, sparsity", "a, mask flips"]
    assert sparsity.lines[0].points == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert list(charts_of("b", [{"step": 1, "loss": float("nan")}])) == []


def test_a_run_shows_them(recipe, tmp_path):
    asked = recipe(compress.SRSTE(steps=2, targets="*.0.mlp.*"), save={"format": "dense", "verify": "own"})
    compress.run(asked, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    curves = {label: record["curve"] for label, record in report["training"].items()}
    assert sparks(curves) in (tmp_path / "report.md").read_text()
    assert "![training](training.svg)" in (tmp_path / "report.md").read_text()
    text = (tmp_path / "training.svg").read_text()
    assert text == str(picture(training_charts(RunResult.from_json(report)), columns=2))
    assert "mask flips" in text and "training.svg" not in report["files"]
