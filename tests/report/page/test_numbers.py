"""Numbers for readers, by hand."""

import pytest

from compress.report.page.numbers import data_size, duration, number, tick_name, with_error


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (470, "470"),
        (0, "0.000"),
        (1234.5, "1,234"),
        (12.345, "12.3"),
        (0.04321, "0.0432"),
        (-1.5, "−1.50"),
        (1.2e-7, "1.20e−07"),
        (float("nan"), "nan"),
    ],
)
def test_three_digits(value, text):
    assert number(value) == text


def test_the_error_decides_the_digits():
    assert with_error(0.081234, 0.00412, "+") == "+0.0812\u00a0±\u00a00.0041"
    assert with_error(-3.5, 12.2) == "−4\u00a0±\u00a012"
    assert with_error(-0.25, None) == with_error(-0.25, 0.0) == "−0.2500"


def test_units():
    assert [data_size(x) for x in (12, 4080, 172.4e6, 1.26e9)] == ["12 bytes", "4.08 kB", "172 MB", "1.26 GB"]
    assert [duration(x) for x in (0.032, 1.26, 263, 4463)] == ["32 ms", "1.3 s", "4 min 23 s", "1 h 14 min"]
    assert duration(119.7) == "2 min 0 s" and duration(7199) == "2 h 0 min" and duration(59.97) == "1 min 0 s"


def test_names_of_ticks():
    assert [tick_name(x) for x in (0.05, 0.1, -2.5, 1e-7)] == ["0.05", "0.1", "−2.5", "1e−07"]
