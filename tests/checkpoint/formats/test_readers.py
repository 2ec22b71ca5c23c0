"""The table of readers states what conformance ran, and plans name the programs that misread a checkpoint."""

import re
from pathlib import Path

import pytest
from schemes import coded, rounding

import compress
from compress import RTN
from compress.checkpoint.formats.readers import programs_run, table

ROWS = Path(__file__).parents[2] / "conformance" / "TABLE.md"
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


def test_the_table_is_that_of_the_rows_of_conformance():
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in ROWS.read_text().splitlines() if line[:2] == "| "
    ]
    ran = set()
    for _, form, label, writer, owner, _, _, result in rows[2:]:
        if writer == "compress" and result == "agrees" and form != "dense" and owner not in EXPORTED:
            first, inputs = label.split()[0], re.search(r"(\w+) inputs", label)
            kind = GRIDS.get(first, first) + ("" if inputs is None else f"+{GRIDS.get(inputs[1], inputs[1])}")
            kind += " static" if "inputs static" in label else ""
            llm_int8 = (form, kind) == ("bitsandbytes", "int8")  # its reader rounds the inputs of int8
            ran.add((form, PROGRAMS[owner], "int8+int8" if llm_int8 else kind))
    stated = table()["run"]
    assert {
        (f, name, grid) for f, programs in stated.items() for name, grids in programs.items() for grid in grids
    } == ran


@pytest.mark.parametrize(
    ("step", "form", "text"),
    [
        (RTN(weights="int3", group_size=32), "gptq", "vLLM refuses it: it reads int4 and int8"),
        (RTN(group_size=32, symmetric=False), "gptq", "ONNX Runtime GenAI computes other weights"),
        (RTN(weights="nf4"), "bitsandbytes", "vLLM refuses it without a plugin"),
    ],
)
def test_a_plan_names_the_programs_that_misread_the_checkpoint(step, form, text, recipe):
    assert any(text in note for note in compress.plan(recipe(step, save={"format": form})).notes)


def test_a_plan_names_none_where_none_is_known(recipe):
    assert not any(note.startswith("save: format") for note in compress.plan(recipe(RTN(group_size=32))).notes)


@pytest.mark.parametrize(
    ("form", "scheme", "programs"),
    [
        ("compressed-tensors", coded("int4", 32), ["transformers", "vLLM"]),
        ("compressed-tensors", coded("int8", "channel"), ["transformers"]),  # vLLM has no kernel for it on a CPU
        ("compressed-tensors", coded("int8", "channel", True, rounding("int8")), ["transformers", "vLLM"]),
        ("compressed-tensors", coded("int4", 32, True, rounding("fp8_e4m3")), ["transformers"]),
        (
            "compressed-tensors",
            coded("fp8_e4m3", "tensor", True, rounding("fp8_e4m3", scale="static")),
            ["transformers"],
        ),
        ("modelopt", coded("fp8_e4m3", "channel", True, rounding("fp8_e4m3")), ["vLLM"]),
        ("modelopt", coded("fp8_e4m3", "tensor", True, rounding("fp8_e4m3", scale="static")), []),
        ("gptq", coded("int4", 32), ["GPTQModel", "vLLM"]),
        ("gptq", coded("int4", 32, False), ["GPTQModel"]),  # vLLM refuses zero points
    ],
)
def test_programs_are_those_that_were_run_on_such_weights_and_inputs(form, scheme, programs):
    assert programs_run(form, [scheme]) == programs
