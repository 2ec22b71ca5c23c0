"""A recipe is a value: YAML and Python spell the same one, and every mistake is told with its place and a remedy."""

import re
from typing import ClassVar

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import compress
from compress import GPTQ, RTN, Calibration, Evaluate, Recipe, Save, SmoothQuant, Wanda
from compress.checkpoint.formats import FORMATS
from compress.errors import ModelError, RecipeError, SeveralErrors, UserError
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.masks import Pattern
from compress.passes.contract.passes import Pass
from compress.recipe.settings import read_setting

# ---- round trips ----

some_text = st.text(min_size=1, max_size=12)
patterns = st.lists(some_text.filter(lambda t: not t.startswith("re:")), min_size=1, max_size=3).map(tuple)
common = {"targets": patterns, "ignore": st.just(()) | patterns}
grids = st.sampled_from(list(GRIDS))
shares = st.floats(0.5, 1, exclude_min=True).map(lambda share: {"percentile": share})
scales = st.sampled_from(["absmax", "mse", "percentile"]) | shares


@st.composite
def quantizing(draw, step=RTN, **more):
    grid, inputs = draw(grids), draw(st.sampled_from(["none", "int8", "fp8_e4m3"]))
    return step(
        weights=grid,
        symmetric=not GRIDS[grid].offset and (GRIDS[grid].symmetric_only or draw(st.booleans())),
        group_size=GRIDS[grid].group_size or draw(st.integers(1, 1 << 20) | st.sampled_from(["channel", "tensor"])),
        scale=draw(scales),
        activations=inputs,
        activation_scale="token" if inputs == "none" else draw(st.sampled_from(["token", "static"])),
        overrides=draw(
            st.just(()) | st.builds(lambda targets, scale: [{"targets": targets, "scale": scale}], patterns, scales)
        ),
        true_sequential=draw(st.booleans()),
        **{name: draw(values) for name, values in {**common, **more}.items()},
    )


@st.composite
def pruning(draw):
    options = {name: draw(values) for name, values in common.items()}
    if draw(st.booleans()):
        m = draw(st.integers(2, 64))
        return Wanda(pattern=f"{draw(st.integers(1, m - 1))}:{m}", **options)
    share = st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True)
    return Wanda(pattern=draw(st.sampled_from(["row", "layer"])), sparsity=draw(share), **options)


quantizer = quantizing() | quantizing(
    GPTQ, act_order=st.sampled_from(["none", "static"]), damping=st.floats(0, 1, exclude_min=True)
)
smoothing = st.builds(SmoothQuant, alpha=st.floats(0, 1), **common)
chains = st.tuples(st.lists(pruning() | smoothing, max_size=2), quantizer).map(lambda pair: [*pair[0], pair[1]])
counts = st.none() | st.integers(2, 1 << 40)
recipes = st.builds(
    Recipe,
    model=some_text,
    dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    device=st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
    seed=st.integers(0, (1 << 63) - 1),
    trust_remote_code=st.booleans(),
    calibration=st.builds(Calibration, source=some_text, sequences=counts, length=counts, batch=st.integers(1, 99)),
    passes=chains,
    save=st.builds(Save, format=st.sampled_from(list(FORMATS)), verify=st.sampled_from(["full", "own"])),
    eval=st.builds(
        Evaluate,
        perplexity=st.lists(some_text.filter(lambda text: text != "self"), unique=True, max_size=3).map(tuple),
        windows=counts,
        length=counts,
    ),
)


@settings(max_examples=25)
@given(recipe=recipes)
def test_yaml_spells_every_recipe(recipe):
    assert Recipe.from_text(recipe.to_yaml()) == recipe
    assert Recipe.from_data(recipe.model_dump(mode="json")) == recipe


@settings(max_examples=20)
@given(recipe=recipes)
def test_every_option_is_spelled_out(recipe):
    data = yaml.safe_load(recipe.to_yaml())
    assert set(data) == set(Recipe.model_fields)
    for step, item in zip(recipe.passes, data["passes"], strict=True):
        assert set(item) == {step.key()} and set(item[step.key()]) == set(type(step).model_fields)


def test_a_home_folder_that_does_not_exist_is_a_name_like_any_other():
    assert Recipe(model="~nobody-here/model", passes=[RTN()]).model == "~nobody-here/model"
    with pytest.raises(ModelError, match="~nobody-here/model"):
        compress.plan(Recipe(model="~nobody-here/model", passes=[RTN()]))


def test_a_recipe_is_read_from_a_file(tmp_path):
    recipe = Recipe(model="x", passes=[Wanda(pattern="2:4"), RTN()])
    (tmp_path / "a.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert Recipe.from_yaml(tmp_path / "a.yaml") == Recipe.from_yaml(str(tmp_path / "a.yaml")) == recipe


def test_short_spellings_are_the_long_ones():
    short = Recipe.from_text("model: x\npasses: [wanda, rtn: {targets: '*.mlp.*'}]\n")
    assert short == Recipe(model="x", passes=[Wanda(), RTN(targets=("*.mlp.*",))])
    assert Recipe.from_text("model: x\npasses:\n- rtn:\n") == Recipe(model="x", passes=[RTN()])


def test_passes_may_be_named_in_python():
    assert Recipe(model="x", passes=["wanda", {"rtn": {"weights": "int3"}}]) == Recipe(
        model="x", passes=[Wanda(), RTN(weights="int3")]
    )


def test_a_recipe_cannot_be_changed_and_its_copy_can():
    recipe = Recipe(model="x", passes=[RTN()])
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1
    assert recipe.model_copy(update={"seed": 1}) != recipe
    assert recipe.model_copy(update={"seed": 1}) == Recipe(model="x", seed=1, passes=[RTN()])


def test_aliases_and_merge_keys_are_values():
    text = """
model: &m x
passes:
  - rtn: {targets: [*m], <<: &o {weights: int3, group_size: 32}}
calibration: {source: *m}
"""
    found = Recipe.from_text(text)
    assert found.calibration.source == "x"
    assert found.passes == (RTN(targets="x", weights="int3", group_size=32),)


def test_a_share_of_the_range_is_read_and_written():
    start = "model: x\npasses:\n- rtn: "
    short, long = (Recipe.from_text(f"{start}{{scale: {s}}}\n") for s in ("percentile", "{percentile: 0.999}"))
    assert short == long and short.passes[0].scale.percentile == 0.999
    assert yaml.safe_load(short.to_yaml())["passes"][0]["rtn"]["scale"] == {"percentile": 0.999}


# ---- mistakes in YAML ----

START = "model: x\npasses:\n  - "
MISTAKES = {
    # name: (text, line:column, message)
    "unknown pass": (START + "gtpq", "3:5", r"passes\[0\] gtpq: pass 'gtpq' is not known; did you mean 'gptq'\?"),
    "pass like no other": (
        START + "zzzzz",
        "3:5",
        f"pass 'zzzzz' is not known; known: {', '.join(list(compress.PASSES)[:5])}, ",
    ),
    "unknown option": (
        START + "gptq: {group_sise: 64}",
        "3:12",
        "group_sise: unknown option; did you mean 'group_size'",
    ),
    "option like no other": (
        START + "rtn:\n      zz: 1",
        "4:7",
        "zz: unknown option; known: activation_clip, activation_scale, activations, ",
    ),
    "unknown key": ("model: x\npasses: [rtn]\npases: []", "3:1", "pases: unknown option; did you mean 'passes'"),
    "unknown key inside": (
        "model: x\npasses: [rtn]\nsave:\n  dtype: auto\n  fromat: dense",
        "5:3",
        "save fromat: unknown option; did you mean 'format'",
    ),
    "unknown format": ("model: x\npasses: [rtn]\nsave: {format: natve}", "3:8", "did you mean 'native'"),
    "unknown choice": ("model: x\npasses: [rtn]\ndtype: half", "3:1", "'float32', 'bfloat16' or 'float16', not 'half'"),
    "unknown device": ("model: x\ndevice: gpu\npasses: [rtn]", "2:1", "use auto, cpu, cuda, or cuda:N"),
    "unknown grid": (START + "rtn: {weights: int9}", "3:11", "grid 'int9' is not known; known: int2, int3"),
    "too much": (START + "wanda: {sparsity: 1.5}", "3:13", r"passes\[0\] wanda sparsity: .*less than 1, not 1\.5"),
    "too little": ("model: x\npasses: [rtn]\ncalibration: {sequences: 0}", "3:15", "greater than 0, not 0"),
    "below zero": ("model: x\npasses: [rtn]\nseed: -1", "3:1", "greater than or equal to 0, not -1"),
    "no group size": (
        START + "rtn: {group_size: 0}",
        "3:11",
        "must be a positive number of columns, channel, or tensor",
    ),
    "another type": ("model: x\npasses: [rtn]\neval: {windows: many}", "3:8", "valid integer.*not 'many'"),
    "text for a list": ("model: x\npasses: [rtn]\neval: {perplexity: c4}", "3:8", "eval perplexity: must be a list"),
    "in a list": (START + "rtn: {targets: [a, [b]]}", "3:24", r"passes\[0\] rtn targets\[1\]: .*string"),
    "no mapping": ("model: x\npasses: [rtn]\ncalibration:", "3:1", "calibration: must be a mapping of options"),
    "no options": (START + "rtn: 4", "3:5", "the options of rtn must be a mapping"),
    "two in one": (START + "rtn: {}\n    gptq: {}", "3:5", r"passes\[0\]: a pass must be one name with its options"),
    "no name": (START + "null", "3:5", "a pass must be one name"),
    "passes as text": ("model: x\npasses: rtn", "2:1", "passes: must be a list, such as"),
    "no passes": ("model: x\npasses: []", "2:1", "passes: must not be empty"),
    "passes missing": ("model: x", "1:1", "passes: is missing"),
    "model missing": ("passes: [rtn]", "1:1", "model: is missing"),
    "regular expression": (
        START + "rtn: {targets: 're:('}",
        "3:11",
        r"'re:\(' is not a regular expression: missing \)",
    ),
    "2:4 unquoted": (START + "wanda: {pattern: 2:4}", "3:13", 'pattern 124 is a number; quote N:M.*"2:4"'),
    "4:2": (START + "wanda: {pattern: '4:2'}", "3:13", "N must be at least 1 and smaller than M"),
    "two sparsities": (
        START + "wanda: {sparsity: 0.3, pattern: '2:4'}",
        "3:5",
        "fixes sparsity 0.5; leave sparsity out",
    ),
    "no search of scales": (
        START + "rtn: {scale: min}",
        "3:11",
        "scale 'min' is not known; write absmax, absmean, mse, importance, percentile",
    ),
    "half of a range": (
        START + "rtn: {scale: {percentile: 0.5}}",
        "3:11",
        "must be a fraction above 0.5 and at most 1",
    ),
    "groups of another size": (
        START + "rtn: {weights: mxfp4, group_size: 64}",
        "3:5",
        "one scale for 32 columns; write 32, or",
    ),
    "zero points of floats": (
        START + "rtn: {weights: nf4, symmetric: false}",
        "3:5",
        "needs an integer grid; nf4 has no",
    ),
    "no such groups": (
        START + "gptq: {act_order: group, group_size: channel}",
        "3:5",
        "needs a number as group_size, not 'channel'; write act_order: static",
    ),
    "order": (
        START + "wanda\n  - rtn: {}\n  - smoothquant",
        "5:5",
        r"passes\[2\] smoothquant: the layers are already quantized by passes\[1\] rtn; put smoothquant before it",
    ),
    "quantized twice": (
        START + "rtn\n  - gptq",
        "4:5",
        r"the same layers would be quantized twice, by passes\[0\] rtn and",
    ),
    "a key twice": (START + "rtn\nmodel: y", "4:1", "duplicate key 'model'; remove one"),
    "an option twice": (START + "rtn: {scale: mse, scale: mse}", "3:23", "duplicate key 'scale'; remove one"),
    "a number as key": (START + "rtn: {1: 2}", "3:11", "a key must be a string"),
    "a list as key": ("model: x\n? [a]\n: b", "2:3", "a key must be a string"),
    "no such alias": (START + "rtn: {targets: *a}", "3:20", "invalid YAML: found undefined alias 'a'"),
    "an alias of itself": ("model: x\npasses: &a\n  - *a", "2:9", "an alias refers to the value that contains it"),
    "aliases that multiply": (
        "model: x\na0: &a0 [x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 8))
        + "passes: [*a7]",
        r"7:\d+",
        "more than 50000 values, with those that aliases stand for; write fewer",
    ),
    "merge keys that multiply": (
        "model: x\na0: &a0 {k: v}\n"
        + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 8))
        + "passes: [*a7]",
        r"7:\d+",
        "more than 50000 values",
    ),
    "deep values": (
        "model: x\npasses: " + "[" * 5000,
        r"2:\d+",
        "values are nested in more than 32 levels; write fewer",
    ),
    "a date": (
        "model: 2020-13-01\npasses: [rtn]",
        "1:8",
        r"'2020-13-01' is not a valid value \(.*month.*\); put it in quotes",
    ),
    "an object": ("model: !!python/name:os.system x", "1:8", "invalid YAML: could not determine a constructor"),
    "a tab": ("model: x\npasses:\n\t- rtn", "3:1", "invalid YAML: found character"),
    "a colon": ("model: a: b", "1:9", "invalid YAML: mapping values are not allowed here"),
    "a character": ("model: x\npasses: [\x00]", "2:10", "invalid YAML: unacceptable character"),
    "two documents": ("model: x\n---\nmodel: y", "2:1", "invalid YAML: but found another document"),
    "a list": ("- rtn", "1:1", "a recipe must be a mapping with the keys model, passes"),
    "a word": ("rtn", "1:1", "a recipe must be a mapping with the keys model, passes"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_line_and_column(name):
    text, place, message = MISTAKES[name]
    with pytest.raises(RecipeError, match=message) as caught:
        Recipe.from_text(text + "\n", "r.yaml")
    assert type(caught.value) is RecipeError and caught.value.exit_code == 2
    assert re.match(f"r.yaml:{place}: ", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a remark\n"])
def test_an_empty_file(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"a\.yaml: the file is empty; a recipe needs the keys"):
        Recipe.from_yaml(tmp_path / "a.yaml")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.yaml: cannot be read .*No such file"):
        Recipe.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="is a folder, not a recipe; write that of a .yaml file"):
        Recipe.from_yaml(tmp_path)
    with pytest.raises(RecipeError, match="/dev/zero: has more than 1 MiB, so it is no recipe; write a shorter one"):
        Recipe.from_yaml("/dev/zero")
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    with pytest.raises(RecipeError, match=r"latin\.yaml: cannot be read .*utf-8"):
        Recipe.from_yaml(tmp_path / "latin.yaml")


# ---- mistakes in Python ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"passes": [RTN(), Wanda()]},
            r"^passes\[1\] wanda: the layers are already quantized by passes\[0\] rtn; put wanda",
        ),
        (
            {"passes": [GPTQ(), RTN()]},
            r"^passes\[1\] rtn: the same layers would be quantized twice, by passes\[0\] gptq and by this pass",
        ),
        ({"passes": []}, "^passes: must not be empty$"),
        ({"passes": RTN()}, "^passes: must be a list"),
        ({"passes": ["gtpq"]}, "did you mean 'gptq'"),
        (
            {"passes": [{"rtn": {"weigths": "int4"}}]},
            r"^passes\[0\] rtn weigths: unknown option; did you mean 'weights'",
        ),
        ({"passes": [RTN()], "sed": 1}, "^sed: unknown option; did you mean 'seed'"),
        ({"passes": [RTN()], "seed": "x"}, "^seed: .*not 'x'"),
        ({"passes": [RTN()], "calibration": {"batch": 0}}, "^calibration batch: .*greater than 0, not 0"),
        ({"passes": [RTN()], "model": None}, "^model: .*not None"),
    ],
)
def test_python_raises_the_same_errors(options, message):
    with pytest.raises(RecipeError, match=message) as caught:
        Recipe(**{"model": "x", **options})
    assert type(caught.value) is RecipeError and isinstance(caught.value, UserError)


def test_plain_values_that_are_no_recipe():
    with pytest.raises(RecipeError, match="a recipe must be a mapping"):
        Recipe.from_data(["rtn"])
    with pytest.raises(RecipeError, match="keys should be strings"):
        Recipe.from_data({"model": "x", "passes": ["rtn"], 1: 2})


def test_the_place_of_a_mistake_is_kept():
    with pytest.raises(RecipeError) as caught:
        Recipe.from_text("model: x\npasses: [rtn: {group_size: 0}]\n")
    assert caught.value.path == ("passes", 0, "rtn", "group_size")


SEVERAL = """model: m
modell: m
calibration: {length: long, mixture: [{sorce: a}, {source: b, weight: -1}]}
plugins: []
passes:
  - gtpq
  - gptq: {damping: x, group_sise: 3}
  - rtn: {overrides: [{targets: a, bits: 3}, {targets: b, scale: none}]}
  - scheme: W4A17
  - smoothquant: {alpha: x}
  - sensitivity: {bits: 3}
  - 3
  - wanda: {allocate: {owl: {M: x, m: 3}}}
save: {format: nativ, dtype: fp16}
"""


def test_all_mistakes_of_a_recipe_are_told_at_once():
    with pytest.raises(SeveralErrors) as caught:
        Recipe.from_text(SEVERAL, "r.yaml", [read_setting("passes.20.rtn.x=3"), read_setting("passes.1.gptq.grid=3")])
    expected = [
        r"--set passes.20.rtn.x=3: passes has 8 items; write an index from 0 to 7",
        r"r.yaml:2:1: modell: unknown option; did you mean 'model'",
        r"r.yaml:3:15: calibration length: input should be a valid integer, .*not 'long'",
        r"r.yaml:3:40: calibration mixture\[0\] sorce: unknown option; did you mean 'source'",
        r"r.yaml:3:63: calibration mixture\[1\] weight: input should be greater than 0, not -1",
        r"r.yaml:6:5: passes\[0\] gtpq: pass 'gtpq' is not known; did you mean 'gptq'",
        r"r.yaml:7:12: passes\[1\] gptq damping: input should be a valid number, .*not 'x'",
        r"r.yaml:7:24: passes\[1\] gptq group_sise: unknown option; did you mean 'group_size'",
        r"--set passes.1.gptq.grid=3: passes\[1\] gptq grid: unknown option; known: ",
        r"r.yaml:8:36: passes\[2\] rtn overrides\[0\] bits: unknown option; did you mean 'weights'",
        r"r.yaml:8:59: passes\[2\] rtn overrides\[1\] scale: scale 'none' is not known; write absmax",
        r"r.yaml:9:5: passes\[3\] scheme: scheme 'W4A17' is not known; did you mean 'W4A16'",
        r"r.yaml:10:19: passes\[4\] smoothquant alpha: input should be a valid number",
        r"r.yaml:11:5: passes\[5\] sensitivity: needs file and bits",
        r"r.yaml:12:5: passes\[6\]: a pass must be one name with its options",
        r"r.yaml:13:30: passes\[7\] wanda allocate owl M: input should be a valid number",
        r"r.yaml:13:36: passes\[7\] wanda allocate owl m: unknown option; known: M, lambda",
        r"r.yaml:14:8: save format: format 'nativ' is not known; did you mean 'native'",
        r"r.yaml:14:23: save dtype: .*did you mean 'float16'",
    ]
    told = [str(error) for error in caught.value.errors]
    assert [line for line in expected if not any(re.match(line, one) for one in told)] == []
    assert len(told) == len(expected)


def test_all_mistakes_of_an_order_are_told_at_once():
    with pytest.raises(SeveralErrors, match=r"passes\[1\] wanda: .*(\n.*)*passes\[2\] smoothquant: "):
        Recipe(model="m", passes=[RTN(), Wanda(), SmoothQuant()])


def test_all_mistakes_of_a_value_in_python_are_told_at_once(pico_model):
    with pytest.raises(SeveralErrors) as caught:
        GPTQ(damping="x", group_sise=3)
    assert [str(error)[:16] for error in caught.value.errors] == ["gptq damping: in", "gptq group_sise:"]
    with pytest.raises(SeveralErrors, match="seed: .*(\n.*)*passes: must not be empty"):
        Recipe(model="m", passes=[], seed="x")
    with pytest.raises(SeveralErrors, match=r"passes\[0\] gtpq: .*(\n.*)*passes\[1\] rtm: "):
        compress.apply(pico_model, ["gtpq", "rtm"])


def test_apply_checks_the_order_before_the_data(pico_model):
    with pytest.raises(RecipeError, match="put wanda before it"):
        compress.apply(pico_model, [RTN(), Wanda()])


class NeedsMask(Pass):
    paper: ClassVar[str] = "none"
    after: ClassVar[frozenset] = frozenset({"masked"})
    never_after: ClassVar[frozenset] = frozenset({"activations_quantized"})

    @classmethod
    def key(cls):
        return "needs_mask"


def test_what_a_pass_needs_before_it():
    assert Recipe(model="x", passes=[Wanda(), NeedsMask()]).labels() == ["passes[0] wanda", "passes[1] needs_mask"]
    with pytest.raises(
        RecipeError, match=r"passes\[0\] needs_mask: the model must be pruned first; put a pass that does"
    ):
        Recipe(model="x", passes=[NeedsMask(), Wanda()])


def test_facts_depend_on_options():
    assert Recipe(model="x", passes=[Wanda(), RTN(), NeedsMask()])
    with pytest.raises(RecipeError, match=r"the layers are already given quantized inputs by passes\[1\] rtn"):
        Recipe(model="x", passes=[Wanda(), RTN(activations="int8"), NeedsMask()])


def test_a_pattern_is_a_value_in_python():
    assert Wanda(pattern=Pattern("2:4")) == Wanda(pattern="2:4")


def test_keys_that_occur_twice_are_listed_with_all_other_mistakes():
    text = "model: x\nmodel: y\npasses:\n  - rtn: {scale: mse, scale: mse, zork: 1}\ndtype: zork\n"
    with pytest.raises(SeveralErrors) as caught:
        Recipe.from_text(text, "recipe")
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 4 and all(line.startswith("- recipe:") for line in lines)
    assert [line.split(":")[1] for line in lines if "duplicate key" in line] == ["2", "4"]


def test_all_plugins_that_fail_are_listed(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "recipe.yaml").write_text("model: x\nplugins:\n  - broken.py\n  - empty.py\npasses: [rtn]\n")
    with pytest.raises(SeveralErrors) as caught:
        Recipe.from_yaml(tmp_path / "recipe.yaml")
    _, first, second = str(caught.value).splitlines()
    assert "recipe.yaml:3:5" in first and "ZeroDivisionError" in first
    assert "recipe.yaml:4:5" in second and "defines no pass" in second
