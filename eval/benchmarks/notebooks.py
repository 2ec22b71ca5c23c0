"""Run the notebooks and store their outputs, as committed: on the real model, without Jupyter.

    python eval/benchmarks/notebooks.py [NOTEBOOK...] --folder WORK

The cells run one after the other in one namespace in the folder WORK. Where the hub is out of reach, a local copy of the
model in WORK under its hub id (HuggingFaceTB/SmolLM2-135M-Instruct) is read in its place. Standard output and the value
of a cell's last line are stored; standard error (progress) is not.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHOWN = {"_repr_svg_": "image/svg+xml", "_repr_html_": "text/html"}


def run_cells(notebook: Mapping[str, Any], name: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run all code cells and put their outputs into them. Returns the namespace.

    parameters: values that replace those of the cell tagged `parameters`, as papermill does it.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        cell["outputs"] = run_cell("".join(cell["source"]), f"{name}, cell {number}", names, number)
        cell["execution_count"] = number
        if parameters and "parameters" in cell["metadata"].get("tags", []):
            assert parameters.keys() <= names.keys(), "the parameters cell sets every parameter"
            names |= parameters
    return names


def run_cell(text: str, title: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The outputs of a cell: what it prints, and the value of its last expression."""
    tree = ast.parse(text)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, title, "exec", dont_inherit=True), names)
        if last is not None:
            value = eval(compile(last, title, "eval", dont_inherit=True), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None:
        data = {kind: lines(getattr(value, method)()) for method, kind in SHOWN.items() if hasattr(value, method)}
        data["text/plain"] = lines(f"<{type(value).__name__}>" if data else repr(value))
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def lines(text: str) -> list[str]:
    """A text as notebooks store it."""
    return text.splitlines(keepends=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "notebooks", nargs="*", metavar="NOTEBOOK", type=Path, default=sorted(NOTEBOOKS.glob("*.ipynb"))
    )
    parser.add_argument("--folder", type=Path, default=Path("."), help="folder to run in")
    arguments = parser.parse_args()
    paths = [path.resolve() for path in arguments.notebooks]
    os.chdir(arguments.folder)
    for path in paths:
        started = time.monotonic()
        notebook = json.loads(path.read_text(encoding="utf-8"))
        run_cells(notebook, path.name)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
