"""Every notebook is executed, cell by cell in one namespace, on the pico model; it is stored with the real model's outputs.

The cell tagged `parameters` is run, and its values are then replaced, as papermill does it.
"""

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
PICO = Path(__file__).parent / "pico" / "model"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.:/<])/(?:home|tmp|root|usr|var|work|opt|Users)\b|[A-Z]:\\")
LITTLE = {"MODEL": str(PICO), "SEQUENCES": 4, "LENGTH": 64, "WINDOWS": 2}

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def ends_with_value(cell: dict) -> bool:
    """Whether the last line of a cell is an expression, whose value a notebook shows."""
    last = ast.parse(source(cell)).body[-1]
    return isinstance(last, ast.Expr) and not (isinstance(last.value, ast.Call) and "print" in ast.unparse(last.value))


def texts(cell: dict) -> list[str]:
    """All that a cell's outputs say."""
    shown = [text for out in cell["outputs"] for text in [out.get("text", []), *out.get("data", {}).values()]]
    return ["".join(lines) for lines in shown]


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """execute(number, parameters) -> the namespace after all cells, and all that they print."""
    monkeypatch.syspath_prepend(str(ROOT / "eval" / "benchmarks"))
    benchmark = importlib.import_module("notebooks")
    monkeypatch.chdir(tmp_path)

    def run(number: int, **parameters) -> tuple[dict, str]:
        notebook = read(NOTEBOOKS[number - 1])
        names = benchmark.run_cells(notebook, NOTEBOOKS[number - 1].name, LITTLE | parameters)
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return names, "\n".join(text for cell in code for text in texts(cell))

    return run


def test_the_notebooks_are_there():
    assert [path.stem for path in NOTEBOOKS] == [
        "01-first-compression",
        "02-compose-and-measure",
        "03-prune-distill-quantize",
        "04-write-a-pass",
    ]


@every_notebook
def test_it_is_stored_with_outputs_of_the_real_model(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    printing = [cell for cell in code if "print(" in source(cell) or ends_with_value(cell)]
    silent = [source(cell) for cell in printing if not cell["outputs"]]
    assert [text for text in silent if "in result.journal.entries" not in text] == []  # nothing fell back
    for cell in code:
        assert all(output["output_type"] in ("stream", "execute_result") for output in cell["outputs"])
        assert [text for text in texts(cell) if ABSOLUTE.search(text) or "Traceback" in text or "Warning" in text] == []
    assert 'MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"' in source(code[0])
    whole = read(path)
    assert whole["nbformat"] == 4 and len({cell["id"] for cell in whole["cells"]}) == len(whole["cells"])


@every_notebook
def test_it_tells_a_story(path):
    first = source(cells(path, "markdown")[0])
    assert first.startswith("# ") and len(first.splitlines()) > 2
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in cells(path, "code")) == 1
    for cell in cells(path, "code"):
        ast.parse(source(cell))  # no shell escapes, no magics: the cells are Python
        assert all(len(line) <= 120 for line in source(cell).splitlines())


@pytest.mark.parametrize("text", ["/".join(("see ", "home", "me")), "/".join(("'", "tmp", "x")), r"C:\Users"])
def test_paths_of_a_machine_would_be_found(text):
    assert ABSOLUTE.search(text) and not ABSOLUTE.search("out/tmp/x and https://arxiv.org/home")


@pytest.mark.slow
def test_a_model_is_compressed_and_read_again(execute, tmp_path):
    names, shown = execute(1, OUT=str(tmp_path / "out"))
    assert "put wanda before it" in shown
    assert "largest difference between computed and reloaded logits: 0" in shown
    assert names["size"]["bits_per_weight"] < 5.2 and (tmp_path / "out" / "report.html").exists()
    assert "The with statement is used to" in shown


@pytest.mark.slow
def test_passes_are_composed_and_sensitivities_are_drawn(execute):
    names, shown = execute(2, SENSITIVITY_LENGTH=32)
    assert "packed as int4" in shown and "put wanda before it" in shown
    assert ElementTree.fromstring(str(names["found"].picture())).tag.endswith("svg") and "<svg" in shown
    assert len(names["both"].models) == 2 and "loss - base" in shown


@pytest.mark.slow
def test_a_model_is_pruned_distilled_and_quantized(execute, tmp_path):
    names, shown = execute(3, OUT=str(tmp_path / "small"), STEPS=4)
    assert 0.49 < names["zeros"] < 0.51 and names["trained"] < names["pruned"]
    assert f"read again: {names['rounded']:.2f}" in shown
    assert names["plan"].checkpoint_bytes < names["plan"].dense_bytes


@pytest.mark.slow
def test_a_pass_is_written(execute):
    names, shown = execute(4)
    assert "the layers are already quantized by passes[0] rtn; put clipsearch before it" in shown
    assert names["ClipSearch"]().steps == 10 and "did you mean 'steps'" in shown and "up_porj" in shown
    assert "['ClipSearch', 'RTN'] keeps the contract" in shown


def test_the_executor_stores_what_jupyter_would(execute):
    run_cell = sys.modules["notebooks"].run_cell
    names: dict = {}
    [printed, shown] = run_cell("print('a')\nx = 1\nx + 1", "cell", names, 7)
    assert printed == {"name": "stdout", "output_type": "stream", "text": ["a\n"]} and names["x"] == 1
    assert shown["data"] == {"text/plain": ["2"]} and shown["execution_count"] == 7
    assert run_cell("None", "cell", names, 1) == [] == run_cell("", "cell", names, 1)
    with pytest.raises(ZeroDivisionError):
        run_cell("1 / 0", "cell", names, 1)
