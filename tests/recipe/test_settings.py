"""Settings: they reach every place of a recipe, and an error names the setting that it comes from."""

import pytest

import compress
from compress import Recipe
from compress.errors import RecipeError
from compress.recipe.settings import read_setting

TEXT = "model: m\npasses:\n  - rtn\n  - wanda:\n  - scheme: W4A16-asym\neval: null\n"
FIRST = "model: m\npasses: [{rtn: {weights: int8}}]\n"


def read(*settings: str, text: str = TEXT) -> Recipe:
    return Recipe.from_text(text, "f", [read_setting(setting) for setting in settings])


@pytest.mark.parametrize(
    ("setting", "get", "value"),
    [
        ("passes.0.rtn.group_size=32", lambda r: r.passes[0].group_size, 32),
        ("passes.0.rtn.overrides={'*.down_proj': {weights: int8}}", lambda r: r.passes[0].overrides[0].dense, False),
        ("passes.0.rtn.targets=['*.q_proj', '*.k_proj']", lambda r: r.passes[0].targets, ("*.q_proj", "*.k_proj")),
        ("seed=7", lambda r: r.seed, 7),
        ("save.format=native", lambda r: r.save.format, "native"),
        ("eval.windows=null", lambda r: r.eval.windows, None),
        ("eval=null", lambda r: r.eval, None),
        ("passes=[{scheme: FP8}]", None, None),
    ],
)
def test_they_replace_values(setting, get, value):
    if get is None:  # a preset that comes by a setting is expanded, too
        assert read(setting, text=FIRST).passes[0].weights == "fp8_e4m3"
    else:
        assert get(read(setting, text=FIRST)) == value


def test_they_reach_passes_by_their_name_alone_and_those_of_presets():
    text = "model: m\npasses:\n  - magnitude\n  - wanda:\n  - scheme: W4A16-asym\neval: null\n"
    found = read(
        "passes.0.magnitude.pattern=2:4", "passes.1.wanda.sparsity=0.25", "passes.3.gptq.damping=0.1", text=text
    )
    assert found.passes[0].pattern.text == "2:4" and found.passes[1].sparsity == 0.25
    assert (found.passes[2].key(), found.passes[3].damping) == ("awq", 0.1)
    assert read("passes.3.gptq.damping=0.1", "passes.3.gptq.damping=0.2", text=text).passes[3].damping == 0.2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "passes.0.rtn.group_sise=3",
            r"^--set passes.0.rtn.group_sise=3: passes\[0\] rtn group_sise: unknown option; did you mean 'group_size'",
        ),
        ("passes.0.rtn.bits=3", "rtn bits: unknown option; did you mean 'weights'\\? Write weights: int3$"),
        ("passes.0.gptq.bits=3", "^--set passes.0.gptq.bits=3: passes.0 is rtn, not gptq$"),
        ("passes.3.gptq.bits=3", "^--set passes.3.gptq.bits=3: passes has 1 items; write an index from 0 to 0$"),
        ("passes.rtn.bits=3", "passes has 1 items; write an index from 0 to 0$"),
        ("passes.0.rtn.weights.a=3", "passes.0.rtn.weights is the value 'int8', which has no options$"),
        ("sede=3", "^--set sede=3: sede: unknown option; did you mean 'seed'"),
        ("save.formt=native", "^--set save.formt=native: save formt: unknown option; did you mean 'format'"),
        ("eval.window=3", "eval window: unknown option; did you mean 'windows'"),
        ("seed", "^--set seed: write KEY=VALUE, such as passes.0.gptq.group_size=128"),
        ("a..b=1", "write KEY=VALUE"),
        ("seed=[", "the value '\\[' is not YAML; put it in quotes"),
        ("passes.0.rtn.symmetric=false", None),
    ],
)
def test_a_mistake_names_its_setting(setting, message):
    if message is None:
        assert not read(setting, text=FIRST).passes[0].symmetric
        return
    with pytest.raises(RecipeError, match=message):
        read(setting, text=FIRST)


def test_a_mistake_of_the_file_has_its_line_and_the_settings_that_take_part():
    text = "model: m\nseed: -1\npasses: [{rtn: {weights: nf4}}]\n"
    with pytest.raises(RecipeError, match="^f:2:1: seed: input should be greater"):
        read("passes.0.rtn.group_size=32", text=text)
    with pytest.raises(RecipeError, match=r"^f:3:11: .*integer grid.* \(with --set passes.0.rtn.symmetric=false\)$"):
        read("passes.0.rtn.symmetric=false", text=text.replace("-1", "1"))


def test_the_values_that_are_changed_are_a_copy():
    data = {"model": "m", "passes": [{"rtn": {"weights": "int8"}}]}
    found = Recipe.from_data(data, [read_setting("passes.0.rtn.weights=int4")])
    assert found.passes == (compress.RTN(weights="int4"),)
    assert data == {"model": "m", "passes": [{"rtn": {"weights": "int8"}}]}
