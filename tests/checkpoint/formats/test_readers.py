"""The table of readers states what conformance ran, and plans name the programs that misread a checkpoint."""

import sys
from pathlib import Path

import pytest
from schemes import coded, rounding

import compress
from compress import RTN
from compress.checkpoint.formats.readers import programs_run, table

sys.path.insert(0, str(Path(__file__).parents[2] / "conformance"))

from table import READERS, TABLE, merged, programs_of, rows_of, with_programs


def test_the_table_is_that_of_the_rows_of_conformance():
    programs = programs_of(rows_of(TABLE.read_text()))
    assert with_programs(READERS.read_text(), programs, table()["run"]) == READERS.read_text()  # run.py --write


def test_new_rows_take_the_places_of_old_ones_or_follow_those_of_their_reader():
    page = "text\n\n| head | b |\n| --- | --- |\n| p | f | int4 | compress | vllm | | | old |\n| p | f | a | b | mlx | | | x |\n"
    new = (
        ("p", "f", "int4", "compress", "vllm", "", "", "agrees"),
        ("p", "f", "int8", "compress", "vllm", "", "", "agrees"),
    )
    assert [row[2:5] + row[-1:] for row in rows_of(merged(page, new))] == [
        ("int4", "compress", "vllm", "agrees"),
        ("int8", "compress", "vllm", "agrees"),
        ("a", "b", "mlx", "x"),
    ]
    assert programs_of(rows_of(merged(page, new))) == {"f": {"vLLM": ["int4", "int8"]}}


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
