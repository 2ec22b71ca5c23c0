"""Limits of quality: by hand, in a recipe, and as the exit code of a run and of `compress eval`."""

import pytest
from click.testing import CliRunner
from sample_report import sample

import compress
from compress.cli import main
from compress.errors import QualityError
from compress.recipe.evaluation import Evaluate, QualityLimits
from compress.results.gate import exceeded_limits
from compress.results.result import RunResult


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"kl": 0.2}, 0),
        ({"kl": 0.05}, 1),
        ({"loss": 0.1}, 0),
        ({"loss": 0.01, "kl": 0.05}, 2),
        ({"task_drop": 0.9}, 0),
    ],
)
def test_limits_by_hand(limits, count):
    values = sample() | {"agreement": None}
    values["perplexity"] = values["perplexity"][:1]
    assert len(exceeded_limits(QualityLimits(**limits), RunResult.from_json(values))) == count


def test_what_was_not_measured_counts_as_exceeded():
    measured = RunResult.from_json(sample() | {"perplexity": None, "agreement": None, "tasks": None})
    limits = QualityLimits(kl=0.2, loss=0.1, task_drop=0.02)
    assert [line.split(":")[0] for line in exceeded_limits(limits, measured)] == [
        "fail_if kl",
        "fail_if loss",
        "fail_if task_drop",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fail_if": {}}, "names no limit"),
        ({"fail_if": {"task_drop": 0.1}}, "without tasks"),
        ({"fail_if": {"kl": 0.1}, "top_k": None}, "top_k"),
        ({"fail_if": {"kl": 0.0}}, "greater than 0"),
        ({"fail_if": {"k": 0.1}}, "fail_if.k"),
    ],
)
def test_limits_that_cannot_be_checked_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Evaluate.model_validate(options)


def test_a_run_above_a_limit_ends_with_3_and_keeps_everything(recipe, tmp_path):
    made = recipe(compress.RTN(weights="int2", group_size=32))
    assert made.eval is not None
    strict = made.eval.model_copy(update={"fail_if": QualityLimits(kl=1e-6)})
    with pytest.raises(QualityError, match="KL divergence .* is above fail_if kl: 1e-06") as caught:
        compress.run(made.model_copy(update={"eval": strict}), tmp_path / "out", progress=False)
    assert caught.value.exit_code == 3
    assert (tmp_path / "out" / "report.json").exists() and compress.load(tmp_path / "out")


@pytest.mark.parametrize("limit", ["kl=0.1", "loss=0.1"])
def test_a_limit_needs_a_base_before_any_work(limit, pico, tmp_path):
    done = CliRunner().invoke(main, ["eval", pico, "--fail-if", limit, "--work", str(tmp_path / "work")])
    assert done.exit_code == 2 and "fail_if limits what a model loses against a base; name a base" in done.stderr
    assert not (tmp_path / "work").exists()


def test_the_exit_code_of_an_evaluation(recipe, pico, texts, tmp_path):
    compress.run(recipe(compress.RTN(weights="int2", group_size=32), eval=None), tmp_path / "out", progress=False)
    suite = tmp_path / "suite.yaml"
    suite.write_text("windows: 2\nlength: 64\nfail_if: {kl: 1.0e-6}\n")
    common = ["--suite", suite, "--text", texts["test"], "--work", tmp_path / "work"]
    done = CliRunner().invoke(main, list(map(str, ["eval", pico, tmp_path / "out", *common])))
    assert done.exit_code == 3 and "is above fail_if kl" in done.stderr and "compared with" in done.stdout
    compared = ["compare", tmp_path / "out", "--base", pico, *common]
    done = CliRunner().invoke(main, list(map(str, compared)))
    assert done.exit_code == 3 and "is above fail_if kl" in done.stderr and "smaller" in done.stdout
