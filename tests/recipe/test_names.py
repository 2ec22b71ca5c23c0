"""Names in recipes: what the source says is what the classes say, and mistakes have the messages of the schema."""

from pathlib import Path

import pytest

import compress
from compress import Calibration, Evaluate, Recipe, Save
from compress.errors import UserError
from compress.passes import PASSES
from compress.passes.contract.problems import mistakes_in
from compress.recipe.described import summary_of
from compress.recipe.names import check_data, check_file
from compress.recipe.outlines import PARTS, outline_of_part, outline_of_pass
from compress.recipe.presets import presets
from compress.recipe.settings import read_setting
from compress.recipe.shipped import shipped

CLASSES = {"": Recipe, "calibration": Calibration, "save": Save, "eval": Evaluate}


def names_of(model) -> list[str]:
    return sorted(field.alias or name for name, field in model.model_fields.items())


def test_outlines_of_passes_are_those_of_the_classes():
    found = {key: outline_of_pass(key, PASSES.kind(key)) for key in PASSES}
    assert {key: sorted(one.options) for key, one in found.items()} == {k: names_of(c) for k, c in PASSES.items()}
    assert {key: one.summary for key, one in found.items()} == {k: summary_of(c) for k, c in PASSES.items()}


@pytest.mark.parametrize("part", PARTS)
def test_outlines_of_parts_are_those_of_the_classes(part):
    assert sorted(outline_of_part(part).options) == names_of(CLASSES[part])


def test_every_shipped_recipe_and_every_preset_passes():
    for name in shipped():
        check_file(name)
    for name in presets():
        check_data({"model": "m", "passes": [{"scheme": name}]})


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("model: m\nmodell: m\npasses: [gptq]", ()),
        ("model: m\npasses:\n  - gtpq: {weights: int4}", ()),
        ("model: m\npasses:\n  - gptq: {bits: 4}", ()),
        ("model: m\npasses:\n  - scheme: W4A16\n  - gptq:\n      wieghts: int4", ()),
        ("model: m\npasses: [{scheme: W4A17}]", ()),
        ("model: m\nmodell: m\npasses: [{gptq: {bits: 4}}, gtpq, {scheme: W4A17}]\nsave: {fromat: x}", ("sede=1",)),
        ("model: m\npasses: [gptq]\ncalibration: {sequence: 4}", ()),
        ("model: m\npasses: [gptq]\nsave: {fromat: native}", ()),
        ("model: m\npasses: [gptq]\neval: {suite: quick, window: 4}", ()),
        ("model: m\npasses: [gptq]", ("passes.0.gptq.group=64",)),
        ("model: m\npasses: [gptq]", ("sede=1",)),
        ("model: m\npasses: [gptq]", ("passes.1.gptq.group_size=64",)),
        ("model: m\npasses: [gptq]", ("passes.0={gtpq: {}}",)),
    ],
)
def test_mistakes_have_the_messages_of_the_schema(text, settings, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    spelled = [read_setting(setting) for setting in settings]
    with pytest.raises(UserError) as expected:
        Recipe.from_yaml(path, spelled)
    with pytest.raises(UserError) as actual:
        check_file(path, spelled)
    assert {str(error) for error in mistakes_in(actual.value)} == {str(error) for error in mistakes_in(expected.value)}


@pytest.mark.parametrize(
    "passes",
    [
        ["my_pass"],  # of the file in plugins
        [{"package.module:Class": {"factor": 2}}],
        [{"sensitivity": {"file": "s.json", "bits": 4}}],
        [3, ["gptq"], {"gptq": {}, "rtn": {}}, {"gptq": 4}],  # mistakes that the schema finds
        "gptq",
    ],
)
def test_what_only_the_schema_can_judge_is_left_to_it(passes):
    check_data({"model": "m", "passes": passes, "plugins": ["./my_pass.py"]})


def test_the_page_of_a_changed_class_is_not_the_stored_one(monkeypatch):
    from compress.recipe import pages

    assert pages.PassPage.stored("rtn") is not None and pages.PassPage.stored("none") is None
    other = outline_of_pass("gptq", "quantize")
    monkeypatch.setattr(pages, "outline_of_pass", lambda key, kind: other)
    assert pages.PassPage.stored("rtn") is None


def test_a_stored_page_is_that_of_the_class():
    from compress.recipe.described import page_of
    from compress.recipe.pages import PassPage

    assert PassPage.stored("gptq") == page_of("gptq", compress.GPTQ)
    assert {path.stem for path in (Path(pages_folder())).glob("*.json")} == set(PASSES)


def pages_folder() -> Path:
    return Path(compress.__file__).parent / "recipe" / "pages"
