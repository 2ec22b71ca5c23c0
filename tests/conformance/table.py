"""The table of rows, and the programs of `readers.yaml` that follow from it; `run.py --write` updates both."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = tuple[str, ...]
"""The cells of a row: model, format, checkpoint, written by, read by, weights, logits, result."""
TABLE = Path(__file__).parent / "TABLE.md"
READERS = Path(__file__).parents[2] / "compress" / "checkpoint" / "formats" / "readers.yaml"
KEY = 5
"""The first cells, which name a row."""
WIDTH = 120

PROGRAMS = {
    "compressed-tensors": "transformers",
    "gptqmodel": "GPTQModel",
    "autoawq": "AutoAWQ",
    "bitsandbytes": "transformers",
    "llamacpp": "llama.cpp",
    "mlx": "mlx-lm",
    "vllm": "vLLM",
}
"""The program of each owner's environment."""
EXPORTED = ("onnx", "openvino")
"""Owners that run what `compress export` made of a checkpoint, not the checkpoint."""
GRIDS = {
    "fp8": "fp8_e4m3",
    "Q2_K": "uint2_k",
    "Q3_K_S": "int3_k",
    "Q3_K_M": "int3_k",
    "Q3_K_L": "int3_k",
    "Q4_K_S": "uint4_k",
    "Q4_K_M": "uint4_k",
    "Q5_K_S": "uint5_k",
    "Q5_K_M": "uint5_k",
    "Q6_K": "int6_k",
}
"""The grids of labels that do not begin with one."""


def rows_of(text: str) -> list[Row]:
    """The rows of a table in Markdown, without its head."""
    return [_cells(line) for line in text.splitlines() if line.startswith("| ")][2:]


def _cells(line: str) -> Row:
    return tuple(cell.strip() for cell in line.split("|")[1:-1])


def line_of(row: Row) -> str:
    """A row in Markdown."""
    return f"| {' | '.join(row)} |"


def merged(text: str, new: Iterable[Row]) -> str:
    """The page with new rows: in the place of those with the same name, or else after the last one of their reader."""
    lines = text.splitlines()
    for row in new:
        place = [i for i, line in enumerate(lines) if line.startswith("| ")][2:]
        cells = {i: _cells(lines[i]) for i in place}
        same = [i for i, old in cells.items() if old[:KEY] == row[:KEY]]
        of_reader = [i for i, old in cells.items() if old[KEY - 1] == row[KEY - 1]]
        if same:
            lines[same[0]] = line_of(row)
        else:
            lines.insert(max(of_reader or place) + 1, line_of(row))
    return "\n".join(lines) + "\n"


def programs_of(rows: Iterable[Row]) -> dict[str, dict[str, list[str]]]:
    """The grids that programs read, by format and program: of weights, with + of inputs (static: with a stored scale)."""
    programs: dict[str, dict[str, list[str]]] = {}
    for _, form, label, writer, owner, _, _, result in rows:
        if writer != "compress" or result != "agrees" or form == "dense" or owner in EXPORTED:
            continue
        first, inputs = label.split()[0], re.search(r"(\w+) inputs", label)
        kind = GRIDS.get(first, first) + ("" if inputs is None else f"+{GRIDS.get(inputs[1], inputs[1])}")
        kind += " static" if "inputs static" in label else ""
        if (form, kind) == ("bitsandbytes", "int8"):  # its reader rounds the inputs of int8
            kind = "int8+int8"
        kinds = programs.setdefault(form, {}).setdefault(PROGRAMS[owner], [])
        if kind not in kinds:
            kinds.append(kind)
    return programs


def with_programs(text: str, programs: Mapping[str, Mapping[str, Sequence[str]]], old: Mapping[str, Any]) -> str:
    """The text of `readers.yaml` with these programs under `run`; the order of those that it had stays."""
    lines = ["run:"]
    for form in _ordered(programs, old):
        lines.append(f"  {form}:")
        before = old.get(form, {})
        for program in _ordered(programs[form], before):
            head = f"    {program}: ["
            kinds = ", ".join(_ordered(programs[form][program], before.get(program, ())))
            lines += textwrap.wrap(f"{head}{kinds}]", WIDTH, subsequent_indent=" " * len(head), break_long_words=False)
    begin, end = re.search(r"^run:\n", text, re.M), re.search(r"^misread:\n", text, re.M)
    assert begin is not None and end is not None, "readers.yaml has no run: before misread:"
    return text[: begin.start()] + "\n".join(lines) + "\n" + text[end.start() :]


def _ordered(new: Iterable[str], old: Iterable[str]) -> list[str]:
    """New names in the order of the old ones, others after them."""
    names, order = list(new), list(old)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))
