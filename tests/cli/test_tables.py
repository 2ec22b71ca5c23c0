"""A table is not broken: a pipe gets whole rows, and a terminal that is too narrow for them gets a line for each cell."""

import pytest
from click.testing import CliRunner

from compress.cli import main
from compress.cli.show import print_items, print_table
from compress.passes import PASSES
from compress.recipe.tables import SHOWN, ResultTable, Shown

ROW = ("out/small", "a text that is far too long for a narrow column " * 2, "1.2345 ± 0.0012")
TABLE = ResultTable("title", ("model", "text", "loss ± se"), [ROW, ("out/large", "", "1.2000 ± 0.0010")])


@pytest.mark.parametrize("columns", [None, "130", "60", "30"])
def test_no_number_is_broken(columns, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    print_table(TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert all(any(cell in line for line in lines) for row in TABLE.rows for cell in (row[0], row[2]))
    in_one_line = any(all(part.strip() in line for part in ROW) for line in lines)
    assert in_one_line == (columns in (None, "130"))
    assert (lines[0] == "title" and max(map(len, lines[1:])) <= int(columns or 130)) or columns == "30"
    if columns == "30":
        assert lines[1] == "out/small" and "  loss ± se  1.2345 ± 0.0012" in lines
        assert lines[-2:] == ["out/large", "  loss ± se  1.2000 ± 0.0010"]


def test_a_long_name_is_divided_after_a_dot(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_table(ResultTable("", ("module", "as"), [("model.layers.*.self_attn.q_proj", "3 bits"), ("a" * 50, "1")]))
    cells = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert cells[:2] == ["model.layers.*.self_attn.", "q_proj"] and "".join(cells[2:]) == "a" * 50


class Hundred(Shown):
    def tables(self):
        return [ResultTable("<b>title", ("a", "b"), [(f"<{i}>", "1") for i in range(100)])]


def test_a_result_in_python_fits_on_a_screen():
    lines = repr(Hundred()).splitlines()
    assert lines[0] == "<b>title" and len(lines) == SHOWN + 3 and str(Hundred()) == repr(Hundred())
    assert lines[-1] == f"... and {100 - SHOWN} rows more"


def test_a_result_in_a_notebook_is_escaped_html():
    text = Hundred()._repr_html_()
    assert text.count("<tr>") == SHOWN + 1 and "&lt;0&gt;" in text and "<b>" not in text and "rows more" in text


def test_empty_columns_are_removed():
    assert ResultTable("", ("a", "b", "c"), [("1", "", "2")]).without_empty_columns() == ResultTable(
        "", ("a", "c"), [("1", "2")]
    )


def test_a_list_is_wrapped_in_its_column_on_a_terminal_only(capsys, monkeypatch):
    items = {"short": "a text of some words " * 6, "a-long-name": "another"}
    monkeypatch.setenv("COLUMNS", "60")
    print_items(items)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 60
    assert [line[:13] for line in lines] == [f"{'short':13}", " " * 13, " " * 13, f"{'a-long-name':13}"]
    monkeypatch.delenv("COLUMNS")
    print_items(items)
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("arguments", [["schemes"], ["recipes"], ["passes"], *(["passes", name] for name in PASSES)])
def test_no_line_is_longer_than_the_terminal(arguments, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(main, arguments)
    words = [word for line in done.stdout.splitlines() if len(line) > 80 for word in line.split() if len(word) < 60]
    assert done.exit_code == 0 and words == []
