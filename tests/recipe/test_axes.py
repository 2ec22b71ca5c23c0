"""Axes of a sweep: values as YAML, names of folders, and mistakes that name the option."""

import pytest

from compress.errors import RecipeError
from compress.recipe.axes import LONGEST, axes_of, combinations, labels, read_axis


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("passes.0.gptq.group_size=32,64, 128", [32, 64, 128]),
        ("model=org/a,b@main,~/c.gguf", ["org/a", "b@main", "~/c.gguf"]),
        ("passes.0.wanda.pattern=2:4,1:4", ["2:4", "1:4"]),
        ("passes.0.gptq.targets=['*.q_proj', '*.k_proj'],'*.mlp.*'", [["*.q_proj", "*.k_proj"], "*.mlp.*"]),
        (
            "passes.0={rtn: {weights: int4}},{gptq: {weights: int4}}",
            [{"rtn": {"weights": "int4"}}, {"gptq": {"weights": "int4"}}],
        ),
        ("eval.top_k=null,128", [None, 128]),
        ("passes.0.wanda.sparsity=0.5", [0.5]),
    ],
)
def test_values_are_yaml_between_commas(text, values):
    axis = read_axis(text)
    assert [setting.value for setting in axis.settings] == values and axis.key == text.partition("=")[0]
    assert [s.value for s in axes_of({axis.key: values})[0].settings] == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("group_size", "--over group_size: write KEY=VALUE,VALUE, such as passes.0.gptq.group_size=32,64,128"),
        ("seed=", "write KEY=VALUE,VALUE"),
        ("a..b=1", "write KEY=VALUE,VALUE"),
        ("=1,2", "write KEY=VALUE,VALUE"),
        ("seed=1,2,1", "--over seed=1,2,1: 1 is listed twice; remove one of them"),
        ("seed=[1,2", "put a value with a comma in quotes or brackets"),
    ],
)
def test_mistakes_name_the_option(text, message):
    with pytest.raises(RecipeError) as error:
        read_axis(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"seed": 3}, "over seed: 3 is no list of values"),
        ({"model": "abc"}, "over model: 'abc' is no list of values"),
        ({"seed": []}, "over seed: there are no values"),
        ({"": [1]}, "'' is no key"),
        ({}, "write at least one"),
    ],
)
def test_mistakes_in_python(over, message):
    with pytest.raises(RecipeError, match=message):
        combinations(axes_of(over))


def test_every_combination_has_a_folder_of_its_values():
    axes = [read_axis("passes.0.gptq.group_size=32,64"), read_axis("model=org/small,folder/large.gguf")]
    assert [combination.name for combination in combinations(axes)] == [
        "group_size=32,model=small",
        "group_size=32,model=large",
        "group_size=64,model=small",
        "group_size=64,model=large",
    ]
    assert combinations(axes)[3].values == {"passes.0.gptq.group_size": 64, "model": "folder/large.gguf"}


def test_names_differ_and_are_short():
    axes = axes_of({"model": ["a/m", "b/m"], "passes.0": [{"rtn": {"weights": f"int{bits}"}} for bits in (4, 8)]})
    names = [combination.name for combination in combinations(axes)]
    assert (
        len(set(names)) == 4
        and names[0].startswith("model=m-1,")
        and all(set(name) & set("/ {}:") == set() for name in names)
    )
    [long] = combinations(axes_of({"passes.0.gptq.targets": ["x" * 300]}))
    [other] = combinations(axes_of({"passes.0.gptq.targets": ["x" * 301]}))
    assert len(long.name) == LONGEST and long.name != other.name


def test_labels_are_the_last_words_that_make_keys_differ():
    assert labels(["passes.0.gptq.group_size", "model"]) == ["group_size", "model"]
    assert labels(["passes.0.awq.group_size", "passes.1.gptq.group_size"]) == ["awq.group_size", "gptq.group_size"]
    assert labels(["passes.0.gptq.seed", "passes.1.gptq.seed"]) == ["passes.0.gptq.seed", "passes.1.gptq.seed"]
    with pytest.raises(RecipeError, match="seed is given twice"):
        combinations([read_axis("seed=1"), read_axis("seed=2")])
