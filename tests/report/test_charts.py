"""Charts: valid SVG with text as text, the same bytes for the same values, colors of both themes, values as tooltips."""

import re
import warnings
from xml.etree import ElementTree

import pytest

from compress.numerics.histogram import Histogram
from compress.report.charts import (
    COLORS,
    MOST_DOTS,
    STYLE,
    HeatMap,
    HistogramChart,
    Interval,
    IntervalChart,
    Line,
    LineChart,
    Picture,
    Point,
    ScatterChart,
    picture,
    shortened,
)
from compress.report.depth import heat_map

HOSTILE = "<b>$x_1$ & 模"
LINES = [Line("main", [(0, 1.0), (5, 3.0), (10, float("nan"))]), Line("base", [(0, 2.0), (10, 2.0)], True)]
ROWS = [
    Interval(HOSTILE, 1.0, 0.5, 1.5, "+1.0", "16 windows", "bad"),
    Interval("b", -0.2, None, None, "−0.2"),
]
CHARTS = {
    "line": LineChart(HOSTILE, LINES, "step", "loss, nats"),
    "histogram": HistogramChart(HOSTILE, Histogram(2.0, [0, 5, 900], [0, 0, 905]), "weight"),
    "unchanged": HistogramChart(HOSTILE, Histogram(2.0, [0, 5, 900], [0, 5, 900]), "weight"),
    "intervals": IntervalChart(HOSTILE, ROWS, "loss difference, nats", "better", "worse"),
    "heat": HeatMap(HOSTILE, [HOSTILE, "b"], ["0", "1"], [[0.0, 1.0], [0.5, None]], "block", "error"),
    "scatter": ScatterChart(HOSTILE, [Point(HOSTILE, 9.0, 0.1, 0.01, HOSTILE, True)], "size, MB", "loss, nats"),
}
AXES = {
    "line": {"step", "loss, nats", "main", "base"},
    "histogram": {"weight", "values per bin", "before", "after"},
    "unchanged": {"weight", "values per bin", "unchanged"},
    "intervals": {"loss difference, nats", "← better", "worse →", "+1.0", "16 windows", HOSTILE},
    "heat": {"block", "1.00   error", HOSTILE},
    "scatter": {"size, MB", "loss, nats", HOSTILE},
}


def texts(root, tag="text"):
    return ["".join(node.itertext()) for node in root.findall(f".//{{*}}{tag}")]


def tooltips(chart):
    """The titles of the elements of a picture; its own title comes first."""
    return texts(ElementTree.fromstring(str(picture([chart]))), "title")[1:]


@pytest.mark.parametrize("kind", CHARTS)
def test_a_chart_is_the_same_svg_each_time(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = str(picture([CHARTS[kind]]))
    assert text == str(picture([CHARTS[kind]]))
    root = ElementTree.fromstring(text)
    assert {*AXES[kind], HOSTILE} <= set(texts(root))  # text is text, and no formula
    assert texts(root, "title")[0] == HOSTILE and not re.search(r"<b>|<image|date", text)
    inline = CHARTS[kind].svg
    assert inline.startswith('<svg class="plot"') and "http" not in inline and "<style" not in inline
    assert "url(" not in text and " id=" not in re.sub(r' id="m\w+"', "", inline)


@pytest.mark.parametrize("kind", CHARTS)
def test_every_color_has_one_in_the_dark_theme(kind):
    light = {light for light, _ in COLORS.values()}
    drawn = set(
        re.findall(
            r"(?:fill|stroke): ?(#\w+)", re.sub(r"<style.*?</style>", "", str(picture([CHARTS[kind]])), flags=re.S)
        )
    )
    assert drawn and drawn <= light
    assert all(f'[style*="fill: {color}"]' in STYLE for color in light)


def test_marks_of_a_chart_are_inside_of_it():
    """The first axis of the line chart goes from 0 to 5: the last point is not a number."""
    root = ElementTree.fromstring(str(picture([CHARTS["line"]])))
    assert tooltips(CHARTS["line"])[:2] == ["main, step 0: 1.00", "main, step 5: 3.00"]
    width, height = float(root.get("width")), float(root.get("height"))
    for use in root.findall(".//{*}use"):
        assert 0 < float(use.get("x")) < width and 0 < float(use.get("y")) < height


def test_long_lines_have_no_dots():
    chart = LineChart("t", [Line("a", [(i, float(i)) for i in range(MOST_DOTS + 1)])], "step", "loss")
    assert tooltips(chart) == []


def test_lines_and_heat_maps_without_numbers_are_drawn():
    nothing = float("nan")
    line = LineChart("t", [Line("a", [(0, nothing)])], "step", "loss")
    heat = HeatMap("t", ["a"], ["0", "1"], [[nothing, None]], "block", "error", is_log=True)
    assert len(ElementTree.fromstring(str(picture([line, heat])))) > 0


def test_shades_of_a_heat_map():
    shades = [CHARTS["heat"].shade(value) for value in (0.0, 0.5, 1.0)]
    assert shades == [0.1, 0.55, 1.0]
    assert HeatMap("", ["a"], ["0"], [[2.0]], "block", "error").shade(2.0) == 0.1
    heat = HeatMap("", ["a"], ["0", "1", "2", "3"], [[0.001, 0.1, 10.0, -1.0]], "block", "error", is_log=True)
    assert [heat.shade(x) for x in (0.001, 0.1, 10.0, -1.0)] == [0.1, 0.55, 1.0, 0.1]
    assert heat.limits == (0.001, 10.0)
    assert HeatMap("", ["a"], ["0"], [[-1.0]], "block", "error", is_log=True).shade(-1.0) == 0.1


def test_values_of_a_heat_map_are_tooltips():
    values = [f"{HOSTILE}, block 0: 0.000", f"{HOSTILE}, block 1: 1.00", "b, block 0: 0.500"]
    assert tooltips(CHARTS["heat"]) == values


def test_a_heat_map_of_kinds_by_depth():
    heat = heat_map("t", [("h.0.a", 1.0), ("h.1.a", 2.0), ("h.1.b", 3.0)], "error")
    assert heat.rows == ["a", "b"] and heat.columns == ["0", "1"] and heat.values == [[1.0, 2.0], [None, 3.0]]
    assert heat_map("t", [("h.0.a", 1.0)], "error") is None


def test_a_picture_places_charts_in_a_grid():
    found = picture([CHARTS["line"], CHARTS["line"], CHARTS["histogram"]], columns=2)
    root = ElementTree.fromstring(str(found))
    assert float(root.get("width")) == 2 * CHARTS["line"].width and len(texts(root)) > 20
    assert isinstance(found, Picture) and found._repr_svg_() == str(found)  # a notebook asks for it


def test_names_are_shortened():
    assert shortened("short", 100) == "short" and shortened("a" * 100, 100) == "a" * 14 + "…"
