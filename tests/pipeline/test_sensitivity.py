"""Sensitivity: one layer at a time, against the whole model run again; choices, budgets, kept results, the command."""

import json

import pytest
import torch
import yaml
from batches import ids_of
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import compress
from compress import cli
from compress.checkpoint.load import load
from compress.data.ids import model_sample
from compress.errors import RecipeError, TargetError
from compress.pipeline.sensitivity import allocate, read_choice, sensitivity

SHAPE = {"windows": 3, "length": 32}


@pytest.fixture(scope="module")
def measured(pico):
    return sensitivity(pico, ["int2", "int3", "int4"], **SHAPE)


def test_a_layer_alone_is_the_model_with_that_layer_alone(pico, measured):
    name = "model.layers.1.mlp.down_proj"
    base, tokenizer = load(pico)
    ids = ids_of(model_sample(base, tokenizer, "embedded", "test", *SHAPE.values())[0])
    other = AutoModelForCausalLM.from_pretrained(pico)
    compress.apply(other, compress.RTN(weights="int2", targets=name))
    with torch.no_grad():
        p, q = (model(ids).logits.double().log_softmax(-1) for model in (base, other))
    exact = (p.exp() * (p - q)).sum(-1).mean()
    found = measured.by_name()[name]["int2"]
    assert found.kl == pytest.approx(float(exact), rel=0.05)  # the tail of the distribution is sampled
    assert found.weights == base.get_submodule(name).weight.numel()
    losses = [-x[:, :-1].gather(-1, ids[:, 1:, None]).mean() for x in (p, q)]
    assert found.loss == pytest.approx(float(losses[1] - losses[0]), abs=1e-5)


def test_every_layer_has_every_choice_and_fewer_bits_cost_more(measured):
    table = measured.by_name()
    assert len(table) == 21 and all(list(row) == ["int2", "int3", "int4"] for row in table.values())
    for row in table.values():
        assert row["int2"].kl > row["int3"].kl > row["int4"].kl > 0 and row["int2"].kl_stderr > 0
        assert row["int2"].bits < row["int3"].bits < row["int4"].bits
    assert len(measured.by_kind()) == 7


def test_a_block_is_all_of_its_layers(pico, measured):
    blocks = sensitivity(pico, ["int2"], level="block", **SHAPE).by_name()
    assert list(blocks) == [f"model.layers.{i}" for i in range(3)]
    layers = [row["int2"].kl for name, row in measured.by_name().items() if name.startswith("model.layers.0.")]
    assert blocks["model.layers.0"]["int2"].kl > max(layers)


def test_any_pass_that_changes_linears_alone_is_a_choice(pico):
    found = sensitivity(pico, ["0.5", "2:4", "gptq: {weights: int3, group_size: 32}"], level="block", **SHAPE)
    assert [next(iter(spelled)) for spelled in found.choices.values()] == ["wanda", "wanda", "gptq"]
    assert all(one.kl > 0 for one in found.found)
    with pytest.raises(TargetError, match=r"choice drop_blocks: changes model\.layers\.\d\..* too"):
        sensitivity(pico, ["drop_blocks: {count: 1}"], **SHAPE)


@pytest.mark.parametrize("bits", [2.5, 3.25, 4.0])
def test_a_budget_is_spent_where_it_helps(measured, bits, pico_model):
    step = allocate(measured, bits)
    assert isinstance(step, compress.RTN)
    compress.apply(pico_model, step)
    table, stored, size = measured.by_name(), 0.0, 0
    for name, row in table.items():
        layer = pico_model.get_submodule(name)
        stored += 8 * layer.scheme.size_bytes(torch.float16)
        size += layer.shape[0] * layer.shape[1]
        assert any(layer.codes.scheme.grid.name == choice for choice in row)
    assert bits - 0.2 < stored / size <= bits


def test_bad_choices_and_budgets(measured, pico):
    with pytest.raises(RecipeError, match="choice int44: no grid, sparsity or pass; did you mean 'int4'"):
        read_choice("int44")
    with pytest.raises(RecipeError, match="choice: write at least one"):
        sensitivity(pico, [])
    with pytest.raises(RecipeError, match=r"bits 9: the choices reach 2\.\d+ to 4\.\d+ bits per weight"):
        allocate(measured, 9)
    with pytest.raises(RecipeError, match="bits: needs choices of one pass"):
        allocate(sensitivity(pico, ["int4"], level="block", **SHAPE), 4.25)


def test_results_are_kept(pico, tmp_path, monkeypatch):
    first = sensitivity(pico, ["int4"], level="block", work=tmp_path, **SHAPE)
    monkeypatch.setattr("compress.pipeline.sensitivity.Reference.divergences", None)  # nothing is computed again
    assert sensitivity(pico, ["int4"], level="block", work=tmp_path, **SHAPE) == first


def test_the_command_prints_tables_and_a_pass(pico, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = ["sensitivity", pico, "--choice", "int3", "--choice", "int4", "--windows", "2", "--length", "16"]
    run = CliRunner().invoke(
        cli.main, [*words, "--bits", "4", "--work", str(tmp_path / "w"), "-o", str(tmp_path / "s.json")]
    )
    assert run.exit_code == 0, run.output
    assert "model.layers.*.mlp.up_proj" in run.stdout and "layers, the most sensitive first" in run.stdout
    assert json.loads((tmp_path / "s.json").read_text())["choices"]["int3"] == {"rtn": {"weights": "int3"}}
    spelled = yaml.safe_load(run.stdout[run.stdout.index("passes:") :])
    assert compress.Recipe.from_data({"model": pico, **spelled}).passes[0].overrides
    whole = CliRunner().invoke(cli.main, [*words, "--bits", "4", "--work", str(tmp_path / "w"), "--json"])
    data = json.loads(whole.stdout)  # one document, with the pass in it
    assert data.pop("passes") == spelled["passes"] and data == json.loads((tmp_path / "s.json").read_text())
    recipe = {"model": pico, "passes": [{"sensitivity": {"file": str(tmp_path / "s.json"), "bits": 4}}]}
    assert compress.Recipe.from_data(recipe) == compress.Recipe.from_data({"model": pico, **spelled})
    page = tmp_path / "s.html"
    every = CliRunner().invoke(cli.main, [*words, "--all", "--work", str(tmp_path / "w"), "-o", str(page)])
    assert page.read_text().count('<figure class="chart">') == 2
    assert "all layers: KL" in every.stdout and every.stdout.count("q_proj") == 3
