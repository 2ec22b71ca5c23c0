"""Every recipe of recipes/ is read, round-trips, runs on the pico model, and is as good as its stored baseline."""

import importlib
import json
import platform
from itertools import combinations

import pytest
import yaml
from on_pico import MEASURED, PICO, RECIPES, ROOT, on_pico
from tolerances import LOGITS
from transformers import AutoTokenizer

import compress
from compress import Recipe
from compress.checkpoint.containers.files import tensor_file_bytes
from compress.data import ids as ids_of
from compress.errors import TargetError
from compress.models.kinds.batch import Examples

STORED = json.loads((ROOT / "eval" / "baselines" / "pico.json").read_text(encoding="utf-8"))
MOST_WORSE = 1.02  # kernels of another CPU may break ties otherwise; a broken algorithm loses more


def test_there_are_recipes_for_all_passes_and_some_chains():
    stems = {path.stem for path in RECIPES}
    assert stems >= {*compress.PASSES, "chain", "demo"}


def test_every_recipe_begins_with_what_it_is_for():
    first = {path.stem: path.read_text(encoding="utf-8").splitlines()[0].rstrip() for path in RECIPES}
    assert {n: line for n, line in first.items() if not (line.startswith("# ") and line.endswith((".", ":")))} == {}


def test_every_recipe_round_trips():
    lost = []
    for path in RECIPES:
        recipe = Recipe.from_yaml(path)
        again = Recipe.from_text(recipe.to_yaml())
        other = Recipe.from_data(yaml.safe_load(path.read_text(encoding="utf-8")))
        lost += [] if recipe == again == other and again.to_yaml() == recipe.to_yaml() else [path.stem]
    assert lost == []


def test_no_recipe_names_a_model_of_one_machine_and_no_two_are_the_same():
    recipes = {path.stem: Recipe.from_yaml(path) for path in RECIPES}
    models = {name: recipe.model for name, recipe in recipes.items()}
    assert {n: m for n, m in models.items() if m.count("/") != 1 or m.startswith((".", "/"))} == {}
    assert [(a, b) for a, b in combinations(recipes, 2) if recipes[a] == recipes[b]] == []


CHANCE = {"qllm": (0.2, 1.05)}
"""Spread of the bits, and of the perplexity, where measured errors decide which channels are split and whether updates
are kept: on these small layers they lie so near each other that sums in another order decide otherwise."""


@pytest.mark.few(1, slow=30)  # their passes run in the tests of the contract, too
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_runs_as_written_and_ships_what_its_baseline_says(path, tmp_path):
    recipe = on_pico(Recipe.from_yaml(path))
    result = compress.run(recipe, tmp_path)
    assert Recipe.from_yaml(tmp_path / "recipe.yaml") == recipe
    assert result.report["verified"]["own"] <= LOGITS
    assert result.report["verified"]["skipped"] or result.report["verified"]["transformers"] <= LOGITS
    quality, size = result.report["perplexity"][0], result.report["size"]
    assert size["checkpoint_bytes"] == tensor_file_bytes(tmp_path)
    wanted = STORED["recipes"].get(path.stem)
    if wanted is not None:
        spread, worse = CHANCE.get(path.stem, (1e-3, MOST_WORSE))
        assert size["bits_per_weight"] == pytest.approx(wanted["bits_per_weight"], abs=spread)
        if quality["sha256"] == STORED["evaluation"]["sha256"]:
            assert quality["compressed"]["perplexity"] <= worse * wanted["perplexity"]


def test_every_baseline_is_of_a_recipe_and_was_measured_on_this_protocol():
    assert set(STORED["recipes"]) <= {path.stem for path in RECIPES}
    measured = STORED["evaluation"]
    asked = (MEASURED.perplexity[0], MEASURED.windows, MEASURED.length)
    assert (measured["text"], measured["windows"], measured["length"]) == asked
    if platform.python_version_tuple()[:2] == tuple(STORED["python"].split(".")[:2]):  # the text is CPython's own
        tokenizer = AutoTokenizer.from_pretrained(PICO)
        ids = ids_of.token_ids(measured["text"], "test", tokenizer, measured["windows"], measured["length"], 0)
        assert Examples.of_ids(ids).sha256() == measured["sha256"]


def test_only_group_sizes_are_changed_to_fit():
    """A recipe whose targets match nothing on the pico model is not bent until it runs."""
    lost = Recipe(model="m", passes=[compress.RTN(targets="*.q_porj")])
    with pytest.raises(TargetError, match="matches no linear"):
        on_pico(lost)
    wide = on_pico(Recipe(model="m", passes=[compress.RTN(group_size=4096)]))
    assert wide.passes[0].group_size == 32


def test_every_row_of_the_benchmarks_is_a_recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "eval" / "benchmarks"))
    for passes in importlib.import_module("rows").ROWS.values():
        assert len(Recipe.model_validate({"model": "m", "passes": passes}).passes) == len(passes)
