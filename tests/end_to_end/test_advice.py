"""Advice leads out: whoever writes what an error says to write gets a plan, and never the same error again.

The advice of a message stands after its last semicolon: 'use group_size: 32, or format: native'. Each alternative is
taken by itself, then that of the next error, until the plan has no error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from model_families import tiny_model
from on_pico import PICO
from planned_chains import CHAINS
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress import PASSES, Recipe, cli
from compress.checkpoint.formats import FORMATS
from compress.errors import CompressError

Change = dict[str, Any]
"""New values of options by key; of the key `pass`: another pass; the value LEFT_OUT: the option is not written."""
LEFT_OUT = object()
SAVED = ("format", "dtype", "verify", "sparse", "tensor_parallel")
DEPTH = 8
VALUE = r"(?!or\b|format\b|leave\b|a\b)[\w.-]+(?![\w.-]*:)"
PAIR = re.compile(rf"\b([a-z_]+): (\[[^\]]*\]|\{{[^}}]*\}}|{VALUE}(?:(?:, or | or |, ){VALUE})*)")
"""An option with a value, or with several to choose from."""


def alternatives(problem: str) -> list[Change]:
    """What a message says to write instead, one change for each alternative; empty: nothing that is an option."""
    *_, advice = problem.split("; ")
    if not re.match(r"(use|write|leave|set|or)\b", advice):
        return []
    found: list[Change] = []
    if "weights: none" in advice and "in overrides" in advice:
        layer = re.search(r"\bmodel\.layers\.\d+(\.\w+)+", problem)
        found.append({"overrides": {"targets": layer[0], "weights": "none"}})
        advice = re.sub(r"weights: none[\w ]* in overrides", "", advice)
    advice = re.sub(r" \([^)]*\)|, (which|whose|or use a grid) .*", "", advice)
    advice = advice.replace("tensor, blocks", "tensor")
    if "one of th" in advice:
        listed = re.search(r"holds weights ([\w, ]+), not ", problem)
        advice = re.sub(r"one of the(m|se)", f"weights: {listed[1]}" if listed else "", advice)
    if listed := re.search(
        r"(?:use|write) ((?:\w+, )*\w+), or (?:format|leave)", advice
    ):  # of what the message is about
        key = "group_size" if re.search(r"group_size|groups of|blocks of", problem) else "weights"
        advice = advice.replace(listed[1], f"{key}: {listed[1]}")
    found += [{"pass": name} for name in re.findall(r"the pass (\w+)", advice) if name in PASSES]
    if whole := re.search(r"use save: \{([^}]*)\}", advice):
        advice = advice.replace(whole[0], whole[1])
    if both := re.search(rf"([a-z_]+): (\[[^\]]*\]|{VALUE}) and (?:leave (\w+) out|([a-z_]+): ({VALUE}))", advice):
        key, value, left_out, second, second_value = both.groups()
        found.append({key: read(value), **({left_out: LEFT_OUT} if left_out else {second: read(second_value)})})
        advice = advice.replace(both[0], "")
    found += [{key: LEFT_OUT} for key in re.findall(r"leave (\w+) out", advice)]
    return found + [{key: read(value)} for key, text in PAIR.findall(advice) for value in _values(text)]


read = yaml.safe_load


def _values(text: str) -> list[str]:
    """The first and the last of the values to choose from: '16, 32 or channel'."""
    values = [text] if text[0] in "[{" else re.split(r", or | or |, ", text)
    return list(dict.fromkeys((values[0], values[-1])))


def changed(data: dict[str, Any], problem: str, change: Change) -> dict[str, Any] | None:
    """The recipe with a change, in the pass that the message names; None: the change is not one of a recipe."""
    data = copy.deepcopy(data)
    place = re.search(r"passes\[(\d+)\]", problem)
    steps = data["passes"]
    for key, value in change.items():
        if key == "overrides":
            ((name, options),) = steps[int(place[1])].items()
            steps[int(place[1])] = {name: {**options, "overrides": [*options.get("overrides", []), value]}}
            continue
        if key in SAVED:
            data["save"][key] = value
            continue
        index = int(place[1]) if place else next((i for i, s in enumerate(steps) if key in fields(s)), None)
        if index is None:
            return None
        ((name, options),) = steps[index].items()
        if key == "pass":
            steps[index] = {value: {}}
        elif key not in fields(steps[index]):
            return None
        else:
            others = {k: v for k, v in (options or {}).items() if k != key}
            steps[index] = {name: others if value is LEFT_OUT else {**others, key: value}}
    return data


def fields(step: dict[str, Any]) -> set[str]:
    ((name, _),) = step.items()
    return set(PASSES[name].model_fields)


def problem_of(data: dict[str, Any]) -> str | None:
    """The first problem of a recipe's plan; None: it has none."""
    try:
        compress.plan(Recipe.from_data(data))
    except CompressError as error:
        lines = str(error).splitlines()
        return next((line.removeprefix("- ") for line in lines if line.startswith("- ")), str(error))
    return None


def paths(data: dict[str, Any], seen: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Follow all advice; yields the messages of each path, and the error that it ends in, which names no option, or None.

    Raises:
        AssertionError: if a path comes back to an error, or does not end.
    """
    problem = problem_of(data)
    if problem is None:
        yield seen, None
        return
    assert problem not in seen, "advice in a circle:\n" + "\n".join([*seen, problem])
    assert len(seen) < DEPTH, "no end of advice:\n" + "\n".join([*seen, problem])
    following = [made for change in alternatives(problem) if (made := changed(data, problem, change)) is not None]
    if not following:
        yield seen, problem
    for made in following:
        yield from paths(made, (*seen, problem))


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("a: b; use format: native", [{"format": "native"}]),
        ("a; use group_size: 32, which Q4_0 has", [{"group_size": 32}]),
        (
            "a; use group_size: channel and symmetric: true, or format: native",
            [{"group_size": "channel", "symmetric": True}, {"format": "native"}],
        ),
        (
            "format awq holds weights int4, int8, not int2; use one of them, or format: native",
            [{"weights": "int4"}, {"weights": "int8"}, {"format": "native"}],
        ),
        (
            "group_size 5 does not divide the 32 inputs; use 16, channel, or format: native",
            [{"group_size": 16}, {"group_size": "channel"}, {"format": "native"}],
        ),
        (
            "x; use save: {format: compressed-tensors}, or train: [norms, weights]",
            [{"format": "compressed-tensors"}, {"train": ["norms", "weights"]}],
        ),
        ("x; use weights: uint4 or uint5, whose groups have a minimum", [{"weights": "uint4"}, {"weights": "uint5"}]),
        ("x; leave activations out", [{"activations": LEFT_OUT}]),
        (
            "x; use activations: none and leave activation_scale out, or format: native",
            [{"activations": "none", "activation_scale": LEFT_OUT}, {"format": "native"}],
        ),
        (
            "x model.layers.0.mlp.up; leave the layer dense (weights: none in overrides), or format: native",
            [{"overrides": {"targets": "model.layers.0.mlp.up", "weights": "none"}}, {"format": "native"}],
        ),
        (
            "group_size 16: y has one scale; write 32, or leave group_size out",
            [{"group_size": LEFT_OUT}, {"group_size": 32}],
        ),
        ("x; use another model", []),
    ],
)
def test_advice_is_read(message, found):
    assert alternatives(message) == found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with one block of 32 and 48 columns, and the tokenizer of the pico model."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", num_hidden_layers=1, vocab_size=1024).save_pretrained(folder)
    AutoTokenizer.from_pretrained(PICO).save_pretrained(folder)
    return str(folder)


WITHOUT_OPTION = r"another (format|model|grid)|use gptq|use the pass|directly after|remove the pass|widen its targets"
"""Advice that is no option of the pass or of `save`."""


@pytest.mark.few(61)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("chain", CHAINS)
def test_the_advice_of_a_plan_is_taken(chain, format_, model, recipe):
    asked = recipe(*CHAINS[chain], model=model, save={"format": format_, "verify": "own"}, eval=None)
    ends = list(paths(yaml.safe_load(asked.to_yaml())))
    last = [problem for _, problem in ends if problem is not None]
    assert all(re.search(WITHOUT_OPTION, problem.split("; ")[-1]) for problem in last), last


# The same of `compress export`, whose options are not those of a recipe.

LAYERS = {
    "int4": {"weights": "int4", "group_size": 32},
    "int8 with zeros": {"weights": "int8", "group_size": "channel", "symmetric": False},
    "nf4": {"weights": "nf4", "group_size": 32},
    "rounded inputs": {"weights": "int8", "group_size": "channel", "activations": "int8"},
    "dense": None,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(name): a checkpoint of the pico model in format native with these layers, or a dense one."""
    made = {}

    def write(name):
        if name not in made:
            model = AutoModelForCausalLM.from_pretrained(PICO)
            if LAYERS[name]:
                compress.apply(model, compress.RTN(**LAYERS[name]))
            folder = tmp_path_factory.mktemp("written") / "model"
            form = "native" if LAYERS[name] else "dense"
            made[name] = compress.save(model, folder, format=form, tokenizer=AutoTokenizer.from_pretrained(PICO))
        return made[name]

    return write


def export_alternatives(problem):
    """What a message of an export says to write instead."""
    problem = re.sub(r"(use format: [\w, -]+?), which .*", r"\1", problem)
    found = [{"format": name} for text in re.findall(r"Lossless formats: ([\w, -]+)", problem) for name in ends(text)]
    found += [{"format": name} for text in re.findall(r"use format: ([\w, -]+)", problem) for name in ends(text)]
    found += [{"dtype": name} for name in re.findall(r"(?:use|write) (?:--)?dtype:? (\w+)", problem)]
    found += [{"type": name} for text in re.findall(r"use type (\w+ or \w+)", problem) for name in ends(text)]
    found += [{"requantize": True}] if "requantize" in problem else []
    found += [{name: "auto"} for name in ("dtype", "type") if "leave one of them out" in problem]
    return found


def ends(text):
    """The first and the last name of a list."""
    names = [name for name in re.split(r", or | or |, ", text.strip()) if name]
    return list(dict.fromkeys((names[0], names[-1])))


def export_paths(folder, options, out, seen=()):
    """As `paths`, of an export."""
    place = out / f"{len(list(out.iterdir()))}"
    try:
        compress.export(folder, place, **options)
    except CompressError as error:
        problem = str(error)
    else:
        yield seen, None
        return
    assert problem not in seen, "advice in a circle:\n" + "\n".join([*seen, problem])
    assert len(seen) < DEPTH, "no end of advice:\n" + "\n".join([*seen, problem])
    following = [change for change in export_alternatives(problem) if not change.items() <= options.items()]
    if not following:
        yield seen, problem
    for change in following:
        yield from export_paths(folder, options | change, out, (*seen, problem))


@pytest.mark.few(11, slow=53)
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("layers", LAYERS)
def test_the_advice_of_an_export_is_taken(layers, format_, dtype, written, tmp_path):
    ended = list(export_paths(written(layers), {"format": format_, "dtype": dtype}, tmp_path))
    assert all(problem is None for _, problem in ended), ended


def test_a_format_that_fixes_the_dtype_of_scales_rounds_them(written, tmp_path):
    """The layers of a float32 checkpoint go to GGUF, whose scales are float16, with a note and without other options."""
    folder = written("int4")
    done = CliRunner().invoke(
        cli.main, ["export", str(folder), "--format", "gguf", "--dtype", "float32", "-o", str(tmp_path / "a")]
    )
    assert done.exit_code == 0, done.output
    assert "format gguf fixes the dtype of scales, so they were rounded to it; the codes are unchanged" in " ".join(
        done.output.split()
    )
