"""A run knows the code it was made with: edited passes are found, and the folder's recipe can be read again."""

import sys
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import field_serializer

import compress
from compress import GPTQ, RTN, Recipe, Wanda
from compress.errors import OutputError, RecipeError
from compress.passes.contract.layers import Solution
from compress.passes.contract.passes import LayerPass
from compress.pipeline.provenance import (
    UNKNOWN,
    changed_code,
    code_of,
    identity,
    inputs_of,
    package_sha256,
    source_sha256,
    written,
)

SCORE = '''"""Prune by a score of one's own."""

from typing import ClassVar

from compress.passes.families.pruning import PruningPass


class Own(PruningPass):
    """Magnitudes."""

    paper: ClassVar[str] = "https://example.org/own"

    def score(self, weight, seen):
        return {score}
'''
UP, FLIPPED = SCORE.format(score="weight.abs()"), SCORE.format(score="1 / (1 + weight.abs())")


@pytest.fixture
def asked(recipe, tmp_path):
    """asked() -> the recipe with the plugin as it is written now."""

    def read():
        return recipe({"own": {"sparsity": 0.5}}, plugins=(str(tmp_path / "own.py"),), save={"format": "dense"})

    return read


def test_a_folder_made_with_other_code_is_refused_and_says_which_pass_changed(asked, tmp_path):
    (tmp_path / "own.py").write_text(UP)
    first = compress.run(asked(), tmp_path / "out").report
    assert set(first["reproduce"]["code"]) == {"own", "compress"}
    assert f"source of own, sha256 | {first['reproduce']['code']['own']}" in (tmp_path / "out/report.md").read_text()
    (tmp_path / "own.py").write_text(FLIPPED)
    with pytest.raises(OutputError, match=r"contains another run \(the code of own changed\); .*overwrite it"):
        compress.run(asked(), tmp_path / "out")
    other = compress.run(asked(), tmp_path / "out", overwrite=True).report
    assert other["checkpoint_sha256"] != first["checkpoint_sha256"]
    assert (tmp_path / "out/plugins/own.py").read_text() == FLIPPED


def test_a_killed_run_is_not_continued_with_other_code(asked, stop, tmp_path):
    (tmp_path / "own.py").write_text(UP)
    stop(asked(), tmp_path / "out")
    (tmp_path / "own.py").write_text(FLIPPED)
    with pytest.raises(OutputError, match="the code of own changed"):
        compress.run(asked(), tmp_path / "out")


def test_a_file_that_changed_after_the_recipe_was_read(asked, tmp_path):
    (tmp_path / "own.py").write_text(UP)
    read = asked()
    (tmp_path / "own.py").write_text(FLIPPED)
    with pytest.raises(RecipeError, match=r"passes\[0\] own: the file of the pass changed after the recipe was read"):
        compress.run(read, tmp_path / "out")


def test_the_identity_is_that_of_what_determines_the_bytes(recipe):
    usual = recipe(RTN(group_size=32))
    code = code_of(usual)

    def identity_of(recipe, model="m", calibration="c"):
        return identity(inputs_of(recipe, model, calibration), code_of(recipe))

    found = identity_of(usual)
    assert set(code) == {"rtn", "compress"} and len(code["rtn"]) == 64
    same = [recipe(RTN(group_size=32), save={"verify": "own"}), usual.model_copy(update={"model": "elsewhere"})]
    assert all(identity_of(one) == found for one in same)
    other = [(recipe(RTN(group_size=16)), "m", "c"), (usual, "n", "c"), (usual, "m", "d")]
    assert all(identity_of(*one) != found for one in other)


def test_verification_can_be_repeated_in_another_way(recipe, tmp_path):
    """Nothing is computed again for it."""
    compress.run(recipe(RTN(group_size=32)), tmp_path)
    before = (tmp_path / "model-00002-of-00004.safetensors").stat().st_mtime_ns
    compress.run(recipe(RTN(group_size=32), save={"verify": "own"}), tmp_path)
    assert (tmp_path / "model-00002-of-00004.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"a": "1", "b": "1"}, {"a": "2", "b": "1"}, "the code of a changed"),
        ({"a": "1", "b": "1", "compress": "1"}, {"a": "2", "b": "2", "compress": "2"}, "the code of a, b changed"),
        ({"a": "1", "compress": "1"}, {"a": "1", "compress": "2"}, "the code of compress itself changed"),
        ({"a": "1", "compress": "1"}, {"b": "1", "compress": "1"}, None),
        ({}, {"a": "1"}, None),
    ],
)
def test_what_changed_in_words(before, now, told):
    assert changed_code(before, now) == told


def test_the_source_of_base_classes_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(number):
        base = UP.replace("Own", "Base").replace("weight.abs()", f"weight.abs() + {number}")
        (tmp_path / "a_base_of_mine.py").write_text(base)
        (tmp_path / "a_child_of_mine.py").write_text(
            "from a_base_of_mine import Base\n\n\nclass Child(Base):\n    '''A child.'''\n"
        )
        for name in ("a_base_of_mine", "a_child_of_mine"):
            sys.modules.pop(name, None)
        [step] = Recipe(model="m", passes=["a_child_of_mine:Child"]).passes
        return source_sha256(type(step))

    assert len({digest(10), digest(200)}) == 2
    assert digest(10) == digest(10)


def test_the_package_is_one_digest_without_what_only_shows(tmp_path):
    def digest(file, text):
        root = tmp_path / file.replace("/", "-") / str(len(text))
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text(text)
        return package_sha256(root)

    assert digest("numerics/scores.py", "a") != digest("numerics/scores.py", "ab")
    assert digest("report/render.py", "a") == digest("report/render.py", "ab")
    assert digest("cli/show.py", "a") == digest("cli/show.py", "ab")
    assert package_sha256() == code_of(Recipe(model="m", passes=[Wanda()]))["compress"]


class Sourceless(LayerPass):
    """A pass whose module has no source."""

    paper: ClassVar[str] = "https://example.org/sourceless"

    def solve(self, weight, seen, layer):
        return Solution(weight / 2)


def test_a_pass_without_source_is_told(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.recipe.plugins.inspect.getsource", lambda module: (_ for _ in ()).throw(OSError()))
    result = compress.run(recipe(Sourceless(targets="*.o_proj"), save={"format": "dense"}), tmp_path)
    assert result.report["reproduce"]["code"][f"{Sourceless.__module__}:Sourceless"] == UNKNOWN
    assert any("the source of this pass is not available" in entry.message for entry in result.journal.entries)


def test_a_recipe_that_could_not_be_read_again_is_not_run(recipe, tmp_path):
    class Local(Sourceless):
        """Of a function."""

    with pytest.raises(
        RecipeError, match=r"recipe.yaml of this run could not be read again: .*put it into a separate file"
    ):
        compress.run(recipe(Local()), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Rounded(Sourceless):
    """Options that are written otherwise than they are."""

    factor: float = 0.25

    @field_serializer("factor")
    def _short(self, value: float) -> float:
        return round(value, 1)


def test_options_that_do_not_read_back_are_an_error():
    with pytest.raises(RecipeError, match=r"passes\[0\] rounded: its options are not the same after a round trip"):
        written(Recipe(model="m", passes=[Rounded()]), Path("out"))


def test_another_recipe_in_a_folder_is_named_by_the_options_that_differ(recipe, stop, tmp_path):
    stop(recipe(RTN(group_size=32)), tmp_path / "out")  # also of a run that is not finished
    for step, options, message in (
        (RTN(group_size=16), {}, r"passes\[0\] rtn group_size: 32 there, 16 here\)"),
        (RTN(group_size=32), {"seed": 7}, r"seed: 0 there, 7 here\)"),
        (GPTQ(group_size=32), {}, r"passes\[0\]: \{\"rtn\".* \.\.\. there, \{\"gptq\""),
    ):
        with pytest.raises(OutputError, match=rf"contains another run \({message}"):
            compress.run(recipe(step, **options), tmp_path / "out", progress=False)
