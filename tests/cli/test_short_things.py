"""Small conveniences of the command line: prompts, sampling, names of other programs, folders that are no model."""

import io
import json
import os
import shlex
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import compress
from compress import RTN, Recipe, cli
from compress.errors import CalibrationError, ModelError, RecipeError, UserError
from compress.pipeline.generate import Answering, generate_text
from compress.recipe import starts

PROMPT = "The with statement is used to"
COMMAND = import_module("compress.cli.generate")


def call(*args, **options):
    """compress ARGS; returns click's result, whose stdout and stderr are apart."""
    return CliRunner().invoke(cli.main, [str(a) for a in args], **options)


def test_a_prompt_comes_from_standard_input(pico):
    expected = call("generate", pico, PROMPT, "--tokens", 6).stdout
    assert expected.strip()
    for args in ((), ("-",)):
        done = call("generate", pico, *args, "--tokens", 6, input=f"{PROMPT}\n")
        assert done.exit_code == 0 and done.stdout == expected
    done = call("generate", pico, input=b"\xff\xfe")
    assert done.exit_code == 2 and "prompt: holds bytes that are no text in UTF-8" in done.stderr


def test_streamed_text_is_the_same_text(pico):
    plain = call("generate", pico, PROMPT, "--tokens", 12, "--no-stream").stdout
    assert call("generate", pico, PROMPT, "--tokens", 12, "--stream").stdout == plain
    pieces = []
    text = generate_text(pico, PROMPT, Answering(tokens=12), on_text=pieces.append)
    assert len(pieces) > 2 and "".join(pieces) == text


@pytest.mark.parametrize("on_terminal", [False, True])
def test_words_are_printed_as_they_come_on_a_terminal(on_terminal, pico, monkeypatch):
    streamed = []
    out = SimpleNamespace(isatty=lambda: on_terminal)
    monkeypatch.setattr(COMMAND, "sys", SimpleNamespace(stdout=out, stdin=sys.stdin))
    answer = "compress.pipeline.generate.generate_text"
    monkeypatch.setattr(answer, lambda *arguments: streamed.append(arguments[-1] is not None) or "text")
    for option in ((), ("--stream",), ("--no-stream",)):
        assert call("generate", pico, "x", *option).exit_code == 0
    assert streamed == [on_terminal, True, False]


def test_a_terminal_is_not_read_as_a_prompt_unless_it_is_asked_for(pico, monkeypatch):
    monkeypatch.setattr("compress.pipeline.generate.generate_text", lambda model, prompt, *rest: f"answer to {prompt}")
    terminal = SimpleNamespace(isatty=lambda: True, buffer=io.BytesIO(b"typed\n"))
    out = SimpleNamespace(isatty=lambda: False)
    monkeypatch.setattr(COMMAND, "sys", SimpleNamespace(stdin=terminal, stdout=out))
    done = call("generate", pico)
    assert done.exit_code == 2 and "write a PROMPT, or pipe it into standard input" in done.stderr
    assert call("generate", pico, "-").stdout == "answer to typed\n"


def test_sampling_has_a_seed(pico):
    def answer(*options):
        done = call("generate", pico, PROMPT, "--tokens", 12, *options)
        assert done.exit_code == 0, done.output
        return done.stdout

    greedy = answer()
    hot = answer("--temperature", 5, "--seed", 1)
    assert hot == answer("--temperature", 5, "--seed", 1) != greedy
    assert hot != answer("--temperature", 5, "--seed", 2)
    assert greedy == answer("--temperature", 0) == answer("--top-k", 1) == answer("--top-p", 1e-6, "--seed", 3)
    assert greedy == answer("--temperature", 5, "--top-k", 1) == answer("--temperature", 5, "--top-p", 1e-6)
    for option in (("--top-k", 40), ("--top-p", 0.99)):  # at a temperature of 1
        assert len({answer(*option, "--seed", seed) for seed in range(4)}) > 1
    for wrong in (("--temperature", -1), ("--top-p", 0), ("--top-p", 2), ("--top-k", 0)):
        assert call("generate", pico, PROMPT, *wrong).exit_code == 2


def test_the_device_of_an_answer(pico):
    assert call("generate", pico, PROMPT, "--tokens", 2, "--device", "cpu").exit_code == 0
    done = call("generate", pico, PROMPT, "--device", "cuda:77")
    assert done.exit_code == 2 and "device: cuda:77 does not exist" in done.stderr


def test_bits_and_group_size_are_a_scheme(pico, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("--set", "calibration.length=32", "--set", "calibration.sequences=2", "--eval", "none")
    done = call("quantize", pico, "--bits", 4, "--group-size", 32, *small)
    assert done.exit_code == 0, done.output
    [folder] = (tmp_path / "out").iterdir()
    assert folder.name == "model-int4-groups-of-32"
    [step] = Recipe.from_yaml(folder / "recipe.yaml").passes
    assert (step.key(), step.weights, step.group_size) == ("gptq", "int4", 32)
    for wrong, message in (
        ((), "write --scheme, such as --scheme W4A16, or --bits"),
        (("--bits", 4, "--scheme", "W4A16"), "--bits 4 replaces a scheme; leave out --scheme W4A16, or --bits"),
        (("--scheme", "W4A16", "--group-size", 32), "--group-size is an option of --bits; a scheme has its own groups"),
    ):
        done = call("quantize", pico, *wrong)
        assert done.exit_code == 2 and f"Error: {message}" in done.stderr


@pytest.mark.parametrize(("text", "fraction"), [("0.5", 0.5), ("50%", 0.5), ("12.5%", 0.125), ("50 %", 0.5)])
def test_a_sparsity_is_a_number_or_a_percentage(text, fraction, pico, monkeypatch):
    asked = []
    monkeypatch.setattr(starts, "prune_line", lambda *args: asked.append(args) or sys.exit())
    call("prune", pico, "--sparsity", text)
    assert [sparsity for _, _, _, sparsity in asked] == [fraction]


def test_no_sparsity_is_named(pico):
    done = call("prune", pico, "--sparsity", "half")
    assert done.exit_code == 2 and "'half' is no fraction; write a number such as 0.5, or 50%" in done.stderr


def test_a_complete_run_says_so(recipe, tmp_path):
    small = recipe(RTN(group_size=32), eval=None, save={"verify": "own"})
    first = compress.run(small, tmp_path / "out", progress=False)
    again = compress.run(small, tmp_path / "out", progress=False)
    told = [entry.message for entry in again.journal.entries if "already complete" in entry.message]
    assert told == ["the checkpoint is already complete; it is only checked and evaluated again"]
    assert not any("already complete" in entry.message for entry in first.journal.entries)


def test_a_model_that_is_not_loaded_cannot_be_compressed_in_memory(pico):
    with pytest.raises(ModelError, match="which is not in memory; load it first: model, tokenizer = compress.load"):
        compress.apply(pico, RTN())
    with pytest.raises(ModelError, match="load it first"):
        compress.apply(None, RTN())


def test_printed_commands_are_quoted(pico, tmp_path):
    path = tmp_path / "my recipes; rm" / "it's.yaml"
    path.parent.mkdir()
    done = call("init", pico, "--target", "8 bits, CPU", "-o", path)
    assert done.exit_code == 0, done.output
    commands = [line.removeprefix("next: ") for line in done.stdout.splitlines() if line.startswith("next: ")]
    commands += [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# compress ")]
    assert len(commands) == 3 and all(shlex.split(command)[2] == str(path) for command in commands)


@pytest.mark.parametrize(
    ("name", "meant"), [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("FP32", "float32")]
)
def test_dtypes_by_the_names_of_other_programs(name, meant, pico, tmp_path, pico_model):
    with pytest.raises(ModelError, match=f"did you mean '{meant}'"):
        compress.load(pico, dtype=name)
    with pytest.raises(UserError, match=f"did you mean '{meant}'"):
        compress.save(pico_model, tmp_path / "out", dtype=name)
    for options in ({"dtype": name}, {"save": {"dtype": name}}):
        with pytest.raises(RecipeError, match=f"did you mean '{meant}'"):
            Recipe(model=pico, passes=[RTN()], **options)


def test_a_number_of_bits_is_answered_by_a_grid():
    for bits in (4, "4", "4bit", "4-bit"):
        with pytest.raises(RecipeError, match=f"weights: grid {bits!r} is not known; write int4$"):
            RTN(weights=bits)


def test_the_folder_of_an_adapter_says_what_to_do(tmp_path, pico, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    for command in ("generate adapter x", "eval adapter", "quantize adapter --scheme W4A16", "inspect adapter"):
        done = call(*command.split())
        assert done.exit_code == 2 and "holds a LoRA adapter, not a model; merge it" in done.stderr
        assert "owner/base" in done.stderr


WORDS = "The quick brown fox jumps over the lazy dog. " * 60


def planned(pico, source, **shape):
    calibration = {"source": str(source), "sequences": 2, "length": 32, **shape}
    return compress.run(
        Recipe(model=pico, passes=[{"gptq": {"group_size": 32}}], calibration=calibration, eval=None),
        source.parent / f"out-{source.name}",
        progress=False,
    ).report["reproduce"]["calibration_sha256"]


def test_a_byte_order_mark_is_no_text(pico, tmp_path):
    (tmp_path / "a.txt").write_text(WORDS, encoding="utf-8")
    (tmp_path / "b.txt").write_text(WORDS, encoding="utf-8-sig")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": WORDS}) + "\n", encoding="utf-8-sig")
    assert len({planned(pico, tmp_path / name) for name in ("a.txt", "b.txt", "c.jsonl")}) == 1
    (tmp_path / "r.yaml").write_text(f"model: {pico}\npasses: [rtn]\n", encoding="utf-8-sig")
    assert Recipe.from_yaml(tmp_path / "r.yaml").model == pico


def test_arrays_of_every_order(pico, tmp_path, pico_ids):
    ids = pico_ids.numpy()
    np.save(tmp_path / "c.npy", ids)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(ids))
    assert planned(pico, tmp_path / "c.npy") == planned(pico, tmp_path / "fortran.npy")
    np.savez(tmp_path / "d.npz", ids)
    (tmp_path / "e.npy").write_bytes((tmp_path / "d.npz").read_bytes())
    for name in ("d.npz", "e.npy"):
        with pytest.raises(CalibrationError, match="holds several arrays"):
            planned(pico, tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_no_file(pico, tmp_path):
    for name in ("pipe.txt", "pipe.npy", "pipe.jsonl"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(CalibrationError, match=f"{name} is not a regular file; write the text to a file first"):
            planned(pico, tmp_path / name)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(RecipeError, match="pipe.yaml: is a pipe; write the recipe to a file first"):
        Recipe.from_yaml(tmp_path / "pipe.yaml")
