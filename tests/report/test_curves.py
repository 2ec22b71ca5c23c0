"""Curves by hand: as text, as a picture, and what is in neither."""

import json
import xml.etree.ElementTree as ElementTree

import compress
from compress.report.curves import picture, series, spark, sparks

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


def test_the_picture_has_every_point_at_its_place():
    """120 pixels high below 36, 280 wide after the first 60: the loss falls from the top, 8, to the bottom, 1."""
    root = ElementTree.fromstring(picture({"a < b": CURVE, "two": CURVE[2:4]}))
    assert (root.get("width"), root.get("height")) == ("1080", "380")
    name = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{name}g")
    assert [panel.get("transform") for panel in panels] == [
        f"translate({x},{y})" for y in (0, 190) for x in (0, 360, 720)
    ]
    lines = [[line.get("points") for line in panel.findall(f"{name}polyline")] for panel in panels]
    assert lines[0] == ["200.0,36.0 340.0,156.0", "60.0,104.6 340.0,138.9"]
    assert lines[1] == ["60.0,156.0 200.0,96.0 340.0,36.0"]
    texts = [text.text for text in panels[0].findall(f"{name}text")]
    assert texts == ["a < b", "loss", "held out", "8", "1", "step 2"]


def test_a_run_shows_them(recipe, tmp_path):
    asked = recipe(compress.SRSTE(steps=2, targets="*.0.mlp.*"), save={"format": "dense", "verify": "own"})
    compress.run(asked, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    curves = {label: record["curve"] for label, record in report["training"].items()}
    assert sparks(curves) in (tmp_path / "report.md").read_text()
    assert "![training](training.svg)" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "training.svg").read_text() == picture(curves)
    assert "mask flips" in picture(curves) and "training.svg" not in report["files"]
