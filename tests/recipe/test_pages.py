"""The page of a pass: words, ranges and defaults of its options, and its measured rows; the committed pages are these."""

import importlib
import json
import re
from pathlib import Path

import pytest

from compress import Recipe
from compress.passes import PASSES
from compress.recipe.described import cost_of, options_of, page_of, summary_of
from compress.recipe.measured import figure, measured, rows_of
from compress.recipe.pages import markdown, options_in_chains

ROOT = Path(__file__).parents[2]


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generate")


def test_every_pass_says_what_it_is_for_and_what_not():
    assert [
        name for name, step in PASSES.items() if not (step.use_for.endswith(".") and step.not_for.endswith("."))
    ] == []
    assert [name for name, step in PASSES.items() if not summary_of(step).endswith(".")] == []


def test_options_have_ranges_and_defaults_in_words():
    found = {option.name: option for option in options_of(PASSES["gptq"])}
    assert found["damping"].values == "a number above 0 and at most 1" and found["damping"].default == "0.01"
    assert found["act_order"].values == "none, static, group" and found["act_order"].default == '"static"'
    assert (
        found["group_size"].values == "an integer or channel, tensor" and found["symmetric"].values == "true or false"
    )
    assert {option.name: option.default for option in options_of(PASSES["wanda"])}["pattern"] == '"row"'
    learned = {option.name: option for option in options_of(PASSES["rotate"])}
    assert learned["learn"].values == "a mapping or null" and learned["learn.steps"].default == "100"
    trained = {option.name: option for option in options_of(PASSES["distill"])}["train"]
    assert trained.values.startswith("a list") and trained.default == "null"
    for name, step in PASSES.items():
        options = list(options_of(step))
        assert [option.name for option in options if not option.description] == [], name
        own = [option.name for option in options if "." not in option.name]
        assert own == [field.alias or key for key, field in step.model_fields.items()]


def test_the_page_has_the_order_the_schemes_and_the_measured_rows():
    page = page_of("gptq", PASSES["gptq"])
    assert dict(page.sections())["Order"] == "No earlier pass may quantize weights."
    lorc = page_of("lorc", PASSES["lorc"])
    assert dict(lorc.sections())["Order"].startswith("An earlier pass must quantize weights.")
    assert "W4A16" in page.schemes and page.paper.endswith("2210.17323")
    found = page.to_json()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, default=list))
    assert {"name", "summary", "text", "use_for", "not_for", "paper", "options", "schemes", "measured"} <= set(found)
    assert {row["name"] for row in found["measured"]} >= {
        "gptq-positive",
        "w8a8-rotated-unshrunk",
        "gptq-int3-positive",
    }
    text = markdown(page, "model: m")
    assert "| `damping` | a number above 0 and at most 1 | `0.01` |" in text and "```yaml\nmodel: m\n```" in text
    alone = markdown(page_of("top_kast", PASSES["top_kast"]), "x")
    assert "No row of [the tables]" in alone


SECTIONS = "When to use it", "Recipe", "Main options", "Cost", "How it works", "Measured", "Other options", "Source"


@pytest.mark.parametrize("name", PASSES)
def test_a_page_answers_the_same_questions_in_the_same_order(name):
    text = (ROOT / "docs" / "passes" / f"{name}.md").read_text(encoding="utf-8")
    titles = re.findall("^## (.*)$", text, re.MULTILINE)
    assert titles == [title for title in SECTIONS if title in titles]
    assert set(SECTIONS) - set(titles) <= {"Other options"}  # all options are main ones
    page = page_of(name, PASSES[name])
    for wanted in (page.use_for, page.not_for, page.cost, page.text, f"<{page.paper}>"):
        assert wanted and wanted in text
    tables = re.sub(r"^## Measured$.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)
    shown = re.findall(r"^\| `([\w.]+)` \|", tables, re.MULTILINE)
    assert sorted(shown) == sorted(option.name for option in page.options)


def test_main_options_are_those_of_the_class_and_those_that_chains_set():
    def main(name):
        return [option.name for option in page_of(name, PASSES[name]).main_options()]

    assert {"weights", "group_size", "activations", "act_order"} <= set(main("gptq"))
    assert "damping" not in main("gptq") and "allocate.bits" not in main("gptq")
    assert "shrinkage" not in main("gptq")  # only the recipes of papers set it
    assert set(main("distill")) == {"train", "epochs", "learning_rate", "ce_weight"}
    assert "shrinkage" not in options_in_chains("gptq") and options_in_chains("nothing") == set()


def test_the_cost_follows_from_the_size_and_the_requirements_of_a_pass():
    def cost(name):
        return cost_of(name, PASSES[name])

    assert cost("rtn").startswith("Reads no calibration text") and "one block" in cost("rtn")
    assert cost("distill").count("in memory") == 3 and cost("distill").endswith("Its time grows with `steps`.")
    assert "whole model" in cost("drop_blocks")  # an option must be given: that of the recipe of its name
    assert "gradients" in cost("signround") and "gradients" not in cost("outlier_suppression")
    assert cost_of("plugin", PASSES["drop_blocks"]) == ""


def test_every_measured_row_is_a_chain_that_a_recipe_takes():
    names = [row.name for table in measured().tables for row in table.rows]
    assert len(names) == len(set(names)) > 40
    for table in measured().tables:
        assert [row.perplexity for row in table.rows] == sorted(
            row.perplexity for row in table.rows
        ) or table.name == "trained"
        for row in table.rows:
            assert Recipe.model_validate({"model": "m", "passes": list(row.passes)}).passes, row.name
    assert [table.name for table, _ in rows_of("awq")] == ["quantized"] and rows_of("nothing") == []
    assert (figure(28.8), figure(102.6), figure(886574)) == ("28.80", "102.6", "886574")


def test_rows_of_the_benchmarks_have_the_options_of_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "eval" / "benchmarks"))
    known = importlib.import_module("rows").ROWS
    recipe = lambda passes: Recipe.model_validate({"model": "m", "passes": list(passes)}).passes  # noqa: E731
    rows = [row for table in measured().tables for row in table.rows if row.name in known and row.name != "signround"]
    assert len(rows) > 40
    assert [row.name for row in rows if recipe(row.passes) != recipe(known[row.name])] == []


def test_the_committed_pages_are_those_that_make_docs_writes(generator):
    pages = generator.pages()
    assert {path.stem for path in pages if path.parent.name == "passes"} == set(PASSES)
    assert {path.stem for path in (ROOT / "docs" / "passes").glob("*.md")} == set(PASSES)
    wrong = [str(path.relative_to(ROOT)) for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert wrong == [], "run make docs"


def test_the_committed_figures_show_the_current_rows(generator):
    """Their bytes depend on matplotlib; their points do not."""
    points = lambda svg: re.findall(r"<title>(.*?)</title>", svg)  # noqa: E731
    for path, text in generator.figures().items():
        assert points(path.read_text(encoding="utf-8")) == points(text) and len(points(text)) > 5, "run make docs"


def test_a_mark_without_a_part_is_an_error_and_others_keep_the_text(generator):
    text = "a\n<!-- generated: one -->\nold\n<!-- end -->\nb\n"
    assert generator.filled(text, {"one": "new"}) == "a\n<!-- generated: one -->\n\nnew\n\n<!-- end -->\nb\n"
    with pytest.raises(KeyError, match="one"):
        generator.filled(text, {})
