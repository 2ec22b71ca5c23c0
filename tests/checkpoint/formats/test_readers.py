"""The table of readers states what conformance ran, and plans name the programs that misread a checkpoint."""

import sys
from pathlib import Path

import pytest
from schemes import coded, rounding

import compress
from compress import RTN
from compress.checkpoint.formats.readers import programs_run, table

sys.path.insert(0, str(Path(__file__).parents[2] / "conformance"))

import owners
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


def test_a_checkpoint_that_ends_a_reader_costs_no_other_row(monkeypatch, tmp_path):
    """A program that aborts in C++ answers for the checkpoints before it, and another process reads those after it."""
    (tmp_path / "readers").mkdir()
    script = tmp_path / "readers" / "with_one.py"
    script.write_text(
        "import json, os, sys\n"
        "for job in json.load(open(sys.argv[1])):\n"
        "    if job['kind'] == 'bad':\n"
        "        print('terminate called\\n  what():  no scalar path\\nframe #1', file=sys.stderr, flush=True)\n"
        "        os.abort()\n"
        "    open(job['out'], 'w').write('read')\n"
    )
    monkeypatch.setattr(owners, "HERE", tmp_path)
    monkeypatch.setattr(owners.Owner, "environment", lambda self, cache: sys.executable)
    jobs = [
        {"kind": kind, "out": str(tmp_path / f"{i}.out")}
        for i, kind in enumerate(("good", "bad", "good", "bad", "good"))
    ]
    owners.Owner("one", (), "one").run("readers/with_one.py", jobs, tmp_path, tmp_path)
    assert [(tmp_path / f"{i}.out").exists() for i in range(5)] == [True, False, True, False, True]
    assert (tmp_path / "1.out.error").read_text() == "ended by signal 6: no scalar path"
    script.write_text("raise SystemExit('no such package')")
    with pytest.raises(RuntimeError, match="no such package"):
        owners.Owner("one", (), "one").run("readers/with_one.py", jobs[:1], tmp_path, tmp_path)
