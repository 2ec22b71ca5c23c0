"""Speed: what is counted by hand, that every figure is there, and where it is shown. The times have no oracle."""

import json

import pytest
import torch
from click.testing import CliRunner

import compress
from compress import RTN, apply, cli
from compress.errors import ModelError
from compress.evaluation import speed
from compress.kernels import dispatch
from compress.native.library import instruction_set
from compress.results.measurements.perplexity import Score
from compress.results.measurements.speed import ModelSpeed, SpeedMeasurement, SpeedResult


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few tokens and little memory, so that a test takes a fraction of a second."""
    for name, value in {
        "TOKENS": 3,
        "PROMPT": 2,
        "PREFILL": 8,
        "WARM_UP": 1,
        "ROUNDS": 1,
        "READ_BYTES": 1 << 16,
    }.items():
        monkeypatch.setattr(speed, name, value)


def test_a_token_reads_all_weights_but_tables_of_embeddings(tiny):
    model = tiny("llama")  # not tied: the table is only looked up in
    inside = sum(p.nbytes for name, p in model.named_parameters() if name != "model.embed_tokens.weight")
    assert speed.token_bytes(model) == inside


def test_a_table_that_is_the_head_is_read(tiny):
    model = tiny("qwen3", tie_word_embeddings=True)
    model.tie_weights()
    assert speed.token_bytes(model) == sum(p.nbytes for p in model.parameters())


def test_packed_weights_are_counted_as_they_are_stored(tiny):
    model = tiny("llama")
    before = speed.token_bytes(model)
    linears = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    weights = sum(m.weight.numel() for m in linears)
    rows = sum(m.weight.shape[0] for m in linears)
    packed = apply(model, RTN(weights="int8", group_size="channel"))
    assert speed.token_bytes(packed) == before - 4 * weights + weights + 4 * rows  # codes of a byte, a scale per row


def test_the_prompt_and_each_token_are_timed(tiny):
    times = speed.generate(tiny("llama"), 2, 4, 5)
    assert len(times) == 5 and all(seconds > 0 for seconds in times)


def test_kernels_are_counted(pico_model, monkeypatch):
    linears = sum(isinstance(m, torch.nn.Linear) for m in pico_model.modules())
    assert speed.kernels_of(pico_model) == {"torch": linears}
    packed = apply(pico_model, RTN(group_size=32))
    expected = "torch" if instruction_set() == "none" else "cpu"
    found = speed.kernels_of(packed)
    assert found.get(expected, 0) >= linears - 1 and sum(found.values()) == linears
    monkeypatch.setattr(dispatch, "KERNELS", [])
    assert speed.kernels_of(packed) == {"torch": linears}


def test_models_are_measured_in_turns(tiny, monkeypatch):
    order = []
    monkeypatch.setattr(speed, "generate", lambda model, *rest: order.append(model) or [0.5] * 8)
    one, other = tiny("llama"), tiny("llama", seed=1)
    counts = []
    found = speed.measure({"one": one, "other": other}, {}, lambda done, of: counts.append((done, of)))
    assert order[:4] == [one, other, one, other]
    assert counts == [(i + 1, len(order)) for i in range(len(order))]  # of two rates of decoding and one of prefill
    assert found.models["one"].decode == {1: 2.0, 8: 16.0} and found.models["one"].prefill == 8 / 0.5
    share = found.models["one"].token_bytes * 2.0 / found.read_bandwidth
    assert found.models["one"].bandwidth_share == pytest.approx(share)


def test_comparison_is_from_the_base_to_the_other():
    def of(decode, size):
        return ModelSpeed(
            load_seconds=None,
            resident_bytes=None,
            decode={1: decode, 8: 4 * decode},
            prefill=100.0,
            token_bytes=size,
            bandwidth_share=0.5,
            kernels={"torch": 1},
            dtype="float32",
        )

    models = {"base": of(10.0, 400_000_000), "compressed": of(30.0, 100_000_000)}
    found = SpeedResult(models=models, instruction_set="none", threads=1, read_bandwidth=1e9)
    assert SpeedMeasurement.summary(found) == [
        ("decode tokens/s, batch 1", "10.0", "30.0", "3.00x"),
        ("decode tokens/s, batch 8", "40.0", "120.0", "3.00x"),
        ("prefill tokens/s", "100.0", "100.0", "1.00x"),
        ("MB read per token", "400", "100", "4.00x smaller"),
    ]


def test_the_command_prints_a_column_for_each_model(pico, tiny_folder):
    other = tiny_folder("llama")
    done = CliRunner().invoke(cli.main, ["bench", pico, "--against", other, "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert list(values["models"]) == [other, pico] and values["instruction_set"] == instruction_set()
    assert all(m["load_seconds"] > 0 and m["decode"]["8"] > 0 for m in values["models"].values())
    shown = CliRunner().invoke(cli.main, ["bench", pico])
    for row in (
        "load, seconds",
        "resident MB",
        "decode tokens/s, batch 8",
        "share of the bandwidth",
        "linears by kernel",
    ):
        assert row in shown.output
    assert f"{instruction_set()} kernels" in shown.output


def test_a_model_that_decodes_nothing_is_an_error(tiny_folder):
    with pytest.raises(ModelError, match="activations: the model has no layers of integer codes"):
        speed.bench(tiny_folder("llama"), activations="int8")
    with pytest.raises(
        ModelError, match="predicts masked tokens and decodes no prompt; bench a model that generates text"
    ):
        speed.bench(tiny_folder("bert"))


def test_a_run_measures_both_models_on_request(recipe, texts, tmp_path):
    measured = compress.Evaluate(perplexity=(texts["test"],), windows=2, length=None, speed=True)
    result = compress.run(recipe(RTN(group_size=32), eval=measured, save={"verify": "own"}), tmp_path, progress=False)
    assert list(result.report["speed"]["models"]) == ["base", "compressed"]
    text = (tmp_path / "report.md").read_text()
    assert "## Speed" in text and "decode tokens/s, batch 1" in text and "MB read per token" in text
    assert Score.model_validate(result.report["perplexity"][0]["base"]).loss > 0


def test_other_runs_do_not_measure_it(recipe, tmp_path):
    result = compress.run(recipe(RTN(group_size=32), save={"verify": "own"}), tmp_path, progress=False)
    assert result.report["speed"] is None and "## Speed" not in (tmp_path / "report.md").read_text()
