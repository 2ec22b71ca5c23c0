"""Suites, and the values of `eval` that recipes can spell."""

import pytest

from compress import Evaluate, Recipe
from compress.errors import RecipeError
from compress.recipe.evaluation import read_suite, suites

TEXT = "model: m\npasses: [rtn]\neval: "


def test_every_suite_is_an_evaluation():
    assert list(suites()) == ["full", "quick", "standard"]
    for name, text in suites().items():
        assert text.startswith("# ") and read_suite(name).tasks
    assert read_suite("standard").tasks == ("arc_easy", "piqa", "hellaswag", "winogrande", "lambada_openai", "boolq")


def test_a_recipe_names_a_suite_and_changes_some_of_its_values():
    assert Recipe.from_text(TEXT + "quick").eval == read_suite("quick")
    changed = Recipe.from_text(TEXT + "{suite: quick, limit: 5, data: tasks}").eval
    assert changed == read_suite("quick", limit=5, data="tasks") and changed.limit == 5
    again = Recipe.from_text(Recipe.from_text(TEXT + "quick").to_yaml())
    assert again.eval == read_suite("quick")  # the resolved recipe spells out all values


def test_a_suite_is_a_file_too(tmp_path):
    (tmp_path / "own.yaml").write_text("perplexity: []\ntasks: [piqa]\nlimit: 3\n")
    assert read_suite(str(tmp_path / "own.yaml")) == Evaluate(perplexity=(), tasks=("piqa",), limit=3)


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("quik", "eval suite: suite 'quik' is not known; did you mean 'quick'?; or write the path of a YAML file"),
        ("{suite: none.yaml}", "suite none.yaml: cannot be read"),
        ("{suite: quick, limit: 0}", "eval limit: input should be greater than 0"),
        ("{tasks: [piqa, piqa]}", "eval tasks: piqa is listed twice; remove one of them"),
        ("{task: [piqa]}", "eval task: unknown option; did you mean 'tasks'?"),
    ],
)
def test_mistakes_in_an_evaluation(spelled, message):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_text(TEXT + spelled)
    assert message in str(caught.value) and "recipe:3:" in str(caught.value)


def test_a_suite_file_that_is_no_mapping(tmp_path):
    (tmp_path / "own.yaml").write_text("- piqa\n")
    with pytest.raises(RecipeError, match="must be a mapping of options, such as tasks"):
        read_suite(str(tmp_path / "own.yaml"))
    with pytest.raises(RecipeError, match="suite quick: limit: input should be greater than 0"):
        read_suite("quick", limit=0)
