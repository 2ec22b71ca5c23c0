"""Sensitivities as data: a recipe makes a pass of a stored file; what is wrong with a file, a budget or an option."""

import pytest

from compress import GPTQ, RTN, Recipe
from compress.errors import RecipeError
from compress.recipe.schema import read_passes
from compress.recipe.sensitivities import Sensitivities, allocation, read_sensitivities

NAMES = [f"model.layers.{i}.mlp.{kind}_proj" for i in range(2) for kind in ("up", "down")]
COSTS = {"int2": (2.25, (0.4, 0.9, 0.1, 0.2)), "int4": (4.25, (0.04, 0.05, 0.01, 0.02))}


def stored(costs=COSTS, level="layer", choices=None) -> Sensitivities:
    found = [
        {
            "name": name,
            "choice": choice,
            "weights": 100,
            "bits": bits,
            "kl": kl[i],
            "kl_stderr": 0.01,
            "loss": kl[i],
            "loss_stderr": None,
        }
        for i, name in enumerate(NAMES)
        for choice, (bits, kl) in costs.items()
    ]
    return Sensitivities.model_validate(
        {
            "compress": "1",
            "model": "m",
            "fingerprint": "f",
            "text": "embedded",
            "windows": 2,
            "length": 16,
            "level": level,
            "choices": choices or {c: {"rtn": {"weights": c}} for c in costs},
            "found": found,
        }
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "s.json").write_text(stored().model_dump_json())
    return tmp_path


def recipe(folder, item: str) -> Recipe:
    path = folder / "r.yaml"
    path.write_text(f"model: m\npasses:\n  - sensitivity: {item}\n")
    return Recipe.from_yaml(path)


def test_bits_go_where_they_help(folder):
    made = recipe(folder, "{file: s.json, bits: 3.25}").passes
    # 2 of 4 layers can have int4: those with the largest differences, 0.9 - 0.05 and 0.4 - 0.04
    wanted = RTN(weights="int2", overrides=[{"targets": NAMES[:2], "weights": "int4"}])
    assert made == (wanted,) or made == (RTN(weights="int4", overrides=[{"targets": NAMES[2:], "weights": "int2"}]),)
    assert recipe(folder, "{file: s.json, bits: 2.25}").passes == (RTN(weights="int2"),)


def test_another_pass_takes_the_measured_choices(folder):
    options = "{act_order: static, scale: mse, group_size: 32}"
    [step] = recipe(folder, f"{{file: s.json, bits: 3.25, with: {{gptq: {options}}}}}").passes
    assert isinstance(step, GPTQ) and (step.act_order, step.scale, step.group_size) == ("static", "mse", 32)
    assert len(step.overrides) == 1 and len(step.overrides[0].targets) == 2
    for spelled in ("gptq", "{gptq: null}"):
        [alone] = recipe(folder, f"{{file: s.json, bits: 3.25, with: {spelled}}}").passes
        assert isinstance(alone, GPTQ) and alone.act_order == "static"


def test_the_resolved_recipe_needs_no_file_and_stands_alone(folder):
    made = recipe(folder, "{file: s.json, bits: 3.25}")
    (folder / "s.json").unlink()
    assert Recipe.from_text(made.to_yaml()) == made


def test_paths_of_python_are_relative_to_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert read_passes([{"sensitivity": {"file": "s.json", "bits": 4.25}}]) == (RTN(weights="int4"),)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("{file: s.json}", r"r\.yaml:3:\d+: .*sensitivity bits: None is not a number of bits per weight; write "),
        ("{file: s.json, bits: three}", "bits: 'three' is not a number"),
        ("{bits: 3}", "needs file and bits; write sensitivity: {file: sensitivity.json, bits: 3.5}"),
        ("3.5", "needs file and bits"),
        ("{file: s.json, bits: 3, wiht: {gptq: {}}}", "wiht: unknown option; did you mean 'with'"),
        ("{file: s.json, bits: 3, with: gtpq}", "with: must be one pass"),
        ("{file: s.json, bits: 3, with: {gtpq: {}}}", "with: must be one pass"),
        ("{file: s.json, bits: 9}", "bits 9: the choices reach 2.25 to 4.25 bits per weight"),
        ("{file: none.json, bits: 3}", "none.json: no readable sensitivities .* write them by compress sensitivity"),
        ("{file: bad.json, bits: 3}", "bad.json: no readable sensitivities"),
        ("{file: block.json, bits: 3}", "needs choices of one pass that differ in size, measured by layer"),
        ("{file: s.json, bits: 3, with: {gptq: {group_sise: 3}}}", "group_sise: unknown option; did you mean"),
    ],
)
def test_mistakes_say_where(folder, item, message):
    (folder / "bad.json").write_text('{"found": 3}')
    (folder / "block.json").write_text(stored(level="block").model_dump_json())
    with pytest.raises(RecipeError, match=message):
        recipe(folder, item)


def test_choices_of_two_passes_and_of_one_size_are_no_choice(folder):
    mixed = stored(choices={"int2": {"rtn": {"weights": "int2"}}, "int4": {"gptq": {"weights": "int4"}}})
    with pytest.raises(RecipeError, match="choices of one pass"):
        allocation(mixed, 3)
    assert read_sensitivities(folder / "s.json") == stored()
