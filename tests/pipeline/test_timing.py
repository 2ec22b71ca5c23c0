"""The predicted time of a run: rates by hand, trials on one block, what is kept of them, and what cannot be predicted."""

import json

import huggingface_hub
import pytest
from click.testing import CliRunner

import compress
from compress import Evaluate
from compress.checkpoint.opening import open_model
from compress.cli import main
from compress.cli.show import in_words
from compress.errors import NumericError
from compress.pipeline import timing as timings
from compress.pipeline.plan import plan
from compress.pipeline.resolve import resolve
from compress.pipeline.timing import Timing, predicted
from compress.pipeline.trial import Bench, Forward, Rate, Trial


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of the user."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / timings.KEPT


def resolved_on_model(asked):
    return resolve(asked, open_model(asked.model))


def test_rates_by_hand(recipe, texts):
    """Pico has three equal blocks; the trial has one batch and two steps."""
    asked = recipe(
        compress.GPTQ(group_size=32, targets="*.self_attn.*"),
        compress.SignRound(group_size=32, iterations=12, targets="*.mlp.*"),
        calibration={"source": texts["calibration"], "sequences": 6, "length": 32, "batch": 2},
        eval=Evaluate(perplexity=(texts["test"],), windows=5, length=32),
    )
    resolved = resolved_on_model(asked)
    gptq, signround = (label for label, _, _ in resolved.steps)
    rates = {
        gptq: Rate(1.0, 0.5),
        signround: Rate(2.0, 0.25, 0.1),
        "capture": Rate(0.1, 0.1),
        "propagate": Rate(1.0),
    }
    found = predicted(resolved, Trial(rates, Forward(2.0, 3.0), Forward(1.0, 3.0)))
    assert found.phases == pytest.approx(
        {
            gptq: 3 * (1 + 2 * 0.5),
            signround: 3 * (2 + 2 * 0.25 + 10 * 0.1),
            "capture": 0.3,
            "propagate": 3.0,
            "evaluate": 5 * (3 * 2 + 3 + 3 * 1 + 3),
        }
    )
    assert found.seconds == pytest.approx(sum(found.phases.values())) and found.unknown == ()


def test_a_pass_of_few_layers_is_scaled_by_its_weights(recipe):
    """One of three blocks, and of it two of seven linears."""
    asked = recipe(compress.RTN(group_size=32, targets="model.layers.1.self_attn.[qk]_proj"), eval=None)
    resolved = resolved_on_model(asked)
    found = predicted(resolved, Trial({resolved.steps[0][0]: Rate(1.0)}, Forward(1, 1), Forward(1, 1)))
    assert found.phases == {resolved.steps[0][0]: 1.0}


def test_a_pass_over_the_whole_model_is_scaled_by_a_forward_pass(recipe):
    asked = recipe(compress.Finetune(epochs=1), eval=None)
    resolved = resolved_on_model(asked)
    found = predicted(resolved, Trial({resolved.steps[0][0]: Rate(4.0)}, Forward(1.0, 3.0), Forward(1.0, 3.0)))
    assert found.phases == {resolved.steps[0][0]: 4.0 * (3 + 3) / (1 + 3)}


def test_trials_are_kept_for_later_plans(recipe, cache, monkeypatch, texts):
    asked = recipe(
        compress.GPTQ(group_size=32),
        compress.Distill(train="norms", steps=30),
        eval=Evaluate(perplexity=(texts["test"],), windows=2, length=32),
    )
    assert plan(asked).timing is None and not cache.exists()
    first = plan(asked, time=True).timing
    assert {"passes[0] gptq", "passes[1] distill", "capture", "evaluate"} <= first.phases.keys()
    assert all(seconds >= 0 for seconds in first.phases.values()) and first.unknown == () and first.seconds > 0
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(timings, "trial", None)
    assert plan(asked).timing == first == plan(asked, time=True).timing
    longer = asked.model_copy(update={"passes": (asked.passes[0], compress.Distill(train="norms", steps=3000))})
    assert plan(longer).timing.phases["passes[1] distill"] >= first.phases["passes[1] distill"]
    other = asked.model_copy(update={"passes": (compress.GPTQ(group_size=16), asked.passes[1])})
    assert plan(other).timing is None
    [file] = cache.iterdir()
    file.write_text('{"rates": 1}')
    assert plan(asked).timing is None  # a damaged file is measured again


def test_a_trial_runs_one_block_with_few_steps(recipe, texts):
    asked = recipe(compress.SignRound(group_size=32, iterations=500), compress.Distill(train="scales", epochs=1))
    bench = Bench.of(resolved := resolved_on_model(asked))
    opened = resolved.opened
    assert bench.model.config.num_hidden_layers == 1 and opened.model.config.num_hidden_layers == 3
    assert all(".layers.0." in name for _, _, names in bench.steps for name in names)
    seconds, model = bench.run(1, 1)
    assert {"passes[0] signround", "passes[1] distill"} <= seconds.keys()
    assert compress.load and any("CompressedLinear" in type(m).__name__ for m in model.modules())
    assert all(tensor.is_meta for tensor in opened.blocks[0].module.parameters())


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((compress.DropBlocks(count=1),), "a pass changes the shape of the model"),
        ((compress.Distill(train="norms", teacher="tests/pico/model"),), "a pass learns from another model"),
    ],
)
def test_what_one_block_does_not_show_is_said(recipe, steps, reason, monkeypatch, pico):
    steps = [s.model_copy(update={"teacher": pico}) if getattr(s, "teacher", None) else s for s in steps]
    found = plan(recipe(*steps), time=True).timing
    assert found.phases == {} and found.unknown == (f"the passes: {reason}",)


def test_a_trial_that_fails_is_no_failure_of_the_plan(recipe, monkeypatch, cache):
    def broken(*_):
        raise NumericError("the block is broken")

    monkeypatch.setattr(timings, "trial", broken)
    found = plan(recipe(compress.RTN(group_size=32)), time=True).timing
    assert found == Timing({}, ("the passes: the block is broken",)) and not cache.exists()


def test_texts_of_unknown_length_and_tasks_are_not_predicted(recipe):
    asked = recipe(compress.RTN(group_size=32), eval=Evaluate(perplexity=("embedded",), windows=None, tasks=("piqa",)))
    resolved = resolved_on_model(asked)
    found = predicted(resolved, Trial({}, Forward(1, 1), Forward(1, 1)))
    assert found.unknown == ("the evaluation on all windows of embedded", "the tasks of lm-eval")


def test_what_the_command_prints(pico, tmp_path, texts):
    file = tmp_path / "r.yaml"
    file.write_text(
        f"model: {json.dumps(pico)}\npasses: [{{rtn: {{group_size: 32}}}}]\n"
        f"eval: {{perplexity: [{json.dumps(texts['test'])}], windows: 1, length: 32}}\n"
    )
    before = CliRunner().invoke(main, ["plan", str(file)])
    assert "time: not measured on this machine yet; --time runs" in before.output
    assert json.loads(CliRunner().invoke(main, ["plan", str(file), "--json"]).output)["time"] is None
    timed = CliRunner().invoke(main, ["plan", str(file), "--time"])
    assert "time: about" in timed.output and "passes[0] rtn" in timed.output and "evaluate" in timed.output
    printed = json.loads(CliRunner().invoke(main, ["plan", str(file), "--json"]).output)["time"]
    assert printed["seconds"] == pytest.approx(sum(printed["phases"].values()))
    assert [in_words(s) for s in (0.04, 45, 600, 9000)] == ["0.0 s", "45 s", "10 min", "2.5 h"]


def test_memory_of_several_processes(recipe):
    """Processes that train hold what one holds, and a float for the sum of every gradient."""
    assert plan(recipe(compress.RTN(group_size=32))).process_bytes is None
    trained = plan(recipe(compress.Finetune(train="weights", epochs=1)))
    weights = sum(out * width for out, width in (layer.shape for layer in trained.layers))
    assert trained.process_bytes - trained.memory_bytes == 4 * weights
