"""Every notebook is executed, cell by cell in one namespace, on the pico model.

The cell tagged `parameters` is run, and its values are then replaced, as papermill does it.
"""

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PICO = Path(__file__).parent / "pico" / "model"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def execute(path: Path, parameters: dict) -> dict:
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells(path, "code"), start=1):
        exec(compile(source(cell), f"{path.name}, cell {number}", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", []):
            assert parameters.keys() <= names.keys(), "the parameters cell sets every parameter"
            names |= parameters
    return names


def test_the_notebooks_are_there():
    assert [path.name[:3] for path in NOTEBOOKS] == ["01-", "02-"]


@every_notebook
def test_it_is_stored_without_outputs(path):
    for cell in cells(path, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
    whole = json.loads(path.read_text(encoding="utf-8"))
    assert whole["nbformat"] == 4 and len({cell["id"] for cell in whole["cells"]}) == len(whole["cells"])


@every_notebook
def test_it_tells_a_story(path):
    first = source(cells(path, "markdown")[0])
    assert first.startswith("# ") and len(first.splitlines()) > 2
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in cells(path, "code")) == 1
    for cell in cells(path, "code"):
        ast.parse(source(cell))  # no shell escapes, no magics: the cells are Python
        assert all(len(line) <= 120 for line in source(cell).splitlines())


@pytest.mark.slow
def test_a_model_is_compressed_and_read_again(tmp_path, capsys):
    small = {"MODEL": str(PICO), "OUT": str(tmp_path / "out"), "SEQUENCES": 4, "LENGTH": 64, "WINDOWS": 2}
    names = execute(NOTEBOOKS[0], small)
    shown = capsys.readouterr().out
    assert "put wanda before it" in shown
    assert "largest difference between computed and reloaded logits: 0" in shown
    assert names["size"]["bits_per_weight"] < 5 and (tmp_path / "out" / "report.md").exists()
    assert "The with statement is used to" in shown


@pytest.mark.slow
def test_passes_are_composed_and_one_is_written(capsys):
    names = execute(NOTEBOOKS[1], {"MODEL": str(PICO), "SEQUENCES": 4, "LENGTH": 64, "WINDOWS": 2})
    shown = capsys.readouterr().out
    assert "packed as int4" in shown
    assert "the layers are already quantized by passes[0] rtn; put clip before it" in shown
    assert names["Clip"]().sigmas == 3.0
    assert "['Clip', 'RTN'] keeps the contract" in shown
