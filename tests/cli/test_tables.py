"""Tables in files and pipes are not folded to the width of a terminal, unless COLUMNS says so."""

import pytest

from compress.cli.show import print_table

ROW = ("out/small", "a text that is far too long for a narrow column " * 2, "1.2345 ± 0.0012")


@pytest.mark.parametrize(("columns", "folded"), [(None, False), ("60", True)])
def test_a_row_in_a_pipe_is_one_line(capsys, monkeypatch, columns, folded):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    print_table("title", ("model", "text", "loss"), [ROW])
    lines = capsys.readouterr().out.splitlines()
    assert any(all(part.strip() in line for part in ROW) for line in lines) != folded
