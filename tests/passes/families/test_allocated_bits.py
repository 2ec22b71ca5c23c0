"""Bits within a budget: as it is written, what is decided, by hand, and what every layer is stored in."""

import pytest
import torch

import compress
from compress import Recipe
from compress.errors import RecipeError, TargetError
from compress.layers.linear import CompressedLinear, linears
from compress.models.experts import open_experts
from compress.numerics.linalg import Regularization
from compress.passes.contract.journal import Journal
from compress.passes.contract.layers import Layer
from compress.passes.contract.observers import Gram
from compress.passes.contract.options import OptionError
from compress.passes.families.bits import Bits, remaining
from compress.pipeline.plan import plan

CHOICES = [{"weights": "int2"}, {"weights": "int4"}]
STEPS = [
    compress.RTN,
    compress.GPTQ,
    compress.HQQ,
    compress.SignRound,
    compress.BlockAP,
    compress.OmniQuant,
    compress.QAT,
]


def stored(model):
    """Name of a linear in the blocks -> its grid and group size."""
    found = {n: m for n, m in linears(model).items() if isinstance(m, CompressedLinear) and m.quantized}
    return {name: (m.scheme.all_codes[0].grid.name, m.scheme.all_codes[0].group_size) for name, m in found.items()}


def mean_bits(model):
    layers = [m for m in linears(model).values() if isinstance(m, CompressedLinear) and m.quantized]
    size = sum(8 * m.scheme.size_bytes(torch.float16) for m in layers)
    return size / sum(m.shape[0] * m.shape[1] for m in layers)


# As it is written


def test_a_number_of_bits_is_enough():
    assert compress.RTN(allocate=3.5).allocate == compress.RTN(allocate={"bits": 3.5}).allocate == Bits(bits=3.5)
    assert compress.RTN(allocate="90MB").allocate == compress.RTN(allocate={"size": "90MB"}).allocate


def test_it_is_spelled_as_it_is_read():
    step = compress.GPTQ(allocate={"bits": 3.25, "by": "hawq", "choices": [{"weights": "int3"}, {"weights": "nf4"}]})
    recipe = Recipe(model="m", passes=[step])
    assert Recipe.from_text(recipe.to_yaml()) == recipe
    assert "probes: 4" not in recipe.to_yaml() or "by: hawq" in recipe.to_yaml()


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{by: kl}", "allocate: write either bits, such as {bits: 3.5}, or size, such as {size: 90MB}"),
        ("{bits: 3, size: 90MB}", "allocate: write either bits, such as"),
        ("{size: much}", "allocate: size: 'much' is no size; write a number and a unit, such as 8GB"),
        ("{bits: 3, least: 0.5}", "allocate: least has no effect without size; leave it out"),
        ("{bits: 0}", "allocate bits: input should be greater than 0"),
        ("{bits: 3, by: loss}", "allocate by: input should be 'kl', 'hawq' or 'sensitivity'"),
        ("{bits: 3, probes: 8}", "allocate: probes has no effect by: kl; leave it out"),
        ("{bits: 3, by: sensitivity, sequences: 8}", "allocate: sequences has no effect by: sensitivity"),
        ("{bits: 3, choices: [{weights: int3}]}", "allocate choices: must not be empty|at least 2 items"),
        ("{bits: 3, choices: [{weights: int3}, {weights: int33}]}", r"allocate choices\[1\] weights: grid 'int33' is"),
        (
            "{bits: 3, choices: [{weights: int3}, {wieghts: int4}]}",
            r"allocate choices\[1\] wieghts: unknown option; did",
        ),
        ("{bits: 3, choices: [{weights: int3}, {weights: int3}]}", "allocate choices: two of them are equal"),
        ("{bits: 3, choices: [{weights: int3}, {weights: none}]}", "allocate choices: weights: none is no choice"),
    ],
)
def test_a_mistake_says_where_it_is(written, message):
    with pytest.raises(RecipeError, match=rf"^r:3:\d+: passes\[0\] rtn ({message})"):
        Recipe.from_text(f"model: m\npasses:\n  - rtn: {{allocate: {written}}}\n", "r")


def test_grids_without_widths_need_choices():
    with pytest.raises(OptionError, match="allocate: grid nf4 has no other widths; write choices"):
        compress.RTN(weights="nf4", allocate=3)


def test_an_option_that_all_choices_state_has_no_effect():
    with pytest.raises(OptionError, match="weights has no effect with allocate, whose choices all state it; leave it"):
        compress.RTN(weights="int8", allocate=3)
    assert compress.RTN(weights="int8", allocate={"bits": 8.4, "choices": [{"group_size": 32}, {"group_size": 64}]})


def test_an_override_cannot_allocate():
    with pytest.raises(OptionError, match="allocate: applies to the whole pass"):
        compress.RTN(overrides={"q_proj": {"allocate": {"bits": 3}}})


# What is decided


@pytest.mark.parametrize("by", ["kl", "hawq", "sensitivity"])
def test_the_budget_is_met_and_layers_of_one_input_are_alike(by, pico_model, pico_ids):
    step = compress.RTN(group_size=32, allocate={"bits": 3.5, "by": by, "choices": CHOICES})
    found = stored(compress.apply(pico_model, step, pico_ids))
    assert {grid for grid, _ in found.values()} == {"int2", "int4"}
    assert 3.2 < mean_bits(pico_model) <= 3.5
    for name, grid in found.items():
        parent, _, leaf = name.rpartition(".")
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            if leaf in others:
                assert grid == found[f"{parent}.{first}"]


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.key())
def test_every_quantizing_pass_allocates(kind, pico_model, pico_ids):
    length = next((name for name in ("steps", "epochs") if name in kind.model_fields), None)
    changes = {} if length is None else {length: 1}
    step = kind(group_size=32, allocate={"bits": 3.5, "choices": CHOICES, "sequences": 2}, **changes)
    journal = Journal()
    compress.apply(pico_model, step, pico_ids, journal=journal)
    assert len(set(stored(pico_model).values())) == 2 and mean_bits(pico_model) <= 3.5
    assert any(entry.message.startswith("layers by choice: ") for entry in journal.entries)


@pytest.mark.parametrize(("bits", "grids"), [(3.0, {"int2", "int3"}), (4.0, {"int3", "int4"}), (4.5, {"int4"})])
def test_the_default_choices_are_next_to_the_budget(bits, grids, pico_model, pico_ids):
    step = compress.RTN(group_size=32, allocate=bits)
    assert {grid for grid, _ in stored(compress.apply(pico_model, step, pico_ids)).values()} == grids


@pytest.mark.parametrize("bits", [2.5, 4.5])
def test_a_budget_at_an_end_of_the_choices_is_uniform(bits, pico_model, pico_ids):
    step = compress.RTN(group_size=32, allocate={"bits": bits, "choices": CHOICES, "by": "sensitivity"})
    assert set(stored(compress.apply(pico_model, step, pico_ids)).values()) == {(f"int{int(bits)}", 32)}
    assert mean_bits(pico_model) == bits


def test_group_sizes_are_choices_too(pico_model, pico_ids):
    choices = [{"group_size": 16}, {"group_size": 64}]
    step = compress.RTN(weights="int4", allocate={"bits": 4.6, "choices": choices, "by": "sensitivity"})
    found = set(stored(compress.apply(pico_model, step, pico_ids)).values())
    assert found == {("int4", 16), ("int4", 64)} and mean_bits(pico_model) <= 4.6


def test_a_layer_that_matters_gets_more_bits(tiny, ids):
    """One layer's outputs are multiplied by nearly nothing, so its error costs nothing."""
    model = tiny("llama", num_hidden_layers=2)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 1e-4
        model.model.layers[0].mlp.up_proj.weight *= 0.5
    step = compress.RTN(group_size=16, targets=["*.mlp.*"], allocate={"bits": 4.0, "choices": CHOICES})
    found = stored(compress.apply(model, step, ids(8, 32)))
    assert found["model.layers.0.mlp.down_proj"][0] == found["model.layers.0.mlp.up_proj"][0] == "int2"
    assert found["model.layers.1.mlp.down_proj"][0] == "int4"


def test_what_compensation_leaves_of_an_error():
    """Against GPTQ itself: relative to rounding to nearest, on inputs with and without correlations."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 32, generator=draw)
    mix = torch.linalg.qr(torch.randn(32, 32, generator=draw))[0] * torch.logspace(0, -2, 32)
    for inputs in (torch.randn(4096, 32, generator=draw), torch.randn(4096, 32, generator=draw) @ mix.T):
        seen = Gram(32, torch.device("cpu"))
        seen.update(inputs)
        layer = Layer("layer", None, torch.float32, lambda *_, **__: None)
        errors = []
        for step in (compress.RTN(group_size=32), compress.GPTQ(group_size=32, scale="absmax", refine=0)):
            wrong = step.codes(weight, seen, layer).dense() - weight
            errors.append(float(((wrong @ seen.shrunk(Regularization())) * wrong).sum()))
        assert remaining(seen) == pytest.approx(errors[1] / errors[0], rel=0.15)


def test_overridden_layers_are_not_part_of_the_budget(pico_model, pico_ids):
    overrides = {"q_proj": {"weights": "int8"}, "o_proj": {"weights": "none"}}
    step = compress.RTN(group_size=32, allocate={"bits": 2.5, "choices": CHOICES}, overrides=overrides)
    found = stored(compress.apply(pico_model, step, pico_ids))
    assert {grid for name, (grid, _) in found.items() if name.endswith("q_proj")} == {"int8"}
    assert {grid for name, (grid, _) in found.items() if not name.endswith("q_proj")} == {"int2"}
    assert not any(name.endswith("o_proj") for name in found)


def test_choices_need_not_fit_overridden_layers(tiny, ids):
    """Groups of 48 columns fit down_proj alone."""
    choices = [{"weights": "int3", "group_size": 48}, {"weights": "int4", "group_size": 48}]
    overrides = {name: {"weights": "int8", "group_size": 16} for name in ("*.self_attn.*", "gate_proj", "up_proj")}
    step = compress.RTN(overrides=overrides, allocate={"bits": 3.9, "choices": choices})
    found = stored(compress.apply(tiny("llama"), step, ids(4, 16)))
    assert {grid for name, grid in found.items() if name.endswith("down_proj")} <= {("int3", 48), ("int4", 48)}
    assert {grid for name, grid in found.items() if not name.endswith("down_proj")} == {("int8", 16)}


def test_experts_of_a_block_are_alike(tiny, ids):
    model = tiny("mixtral")
    open_experts(model)
    step = compress.RTN(group_size=16, allocate={"bits": 4.0, "choices": CHOICES})
    found = stored(compress.apply(model, step, ids(8, 32)))
    experts = {name: grid for name, grid in found.items() if ".experts." in name}
    kinds = {(name.partition(".experts.")[0], name.rpartition(".")[2]) for name in experts}
    assert kinds
    for block, leaf in kinds:
        assert len({grid for name, grid in experts.items() if name.startswith(block) and name.endswith(leaf)}) == 1


# In a run


def test_the_plan_checks_every_choice(pico, texts):
    def of(choices, form="native", bits=3.5):
        step = compress.RTN(group_size=32, allocate={"bits": bits, "choices": choices})
        calibration = compress.Calibration(source=texts["calibration"], sequences=None, length=None)
        return Recipe(model=pico, passes=[step], calibration=calibration, save={"format": form})

    assert plan(of(CHOICES)).layers[0].scheme.all_codes[0].grid.name == "int2"
    with pytest.raises(TargetError, match=r"passes\[0\] rtn allocate: bits 6: the choices reach 2.5 to 4.5 bits per"):
        plan(of(CHOICES, bits=6))
    with pytest.raises(TargetError, match=r"passes\[0\] rtn: model.layers.0.self_attn.q_proj: "):
        plan(of([{"weights": "int4"}, {"weights": "nf4"}], form="compressed-tensors", bits=4.5))


def test_the_plan_counts_the_memory_of_derivatives(pico, texts):
    def needs(by):
        step = compress.RTN(group_size=32, allocate={"bits": 3.5, "by": by, "choices": CHOICES})
        calibration = compress.Calibration(source=texts["calibration"], sequences=None, length=None)
        fit = plan(Recipe(model=pico, passes=[step], calibration=calibration)).fit
        return {need.where: need.parts for need in fit.needs}

    simple, second = (needs(by)["passes[0] rtn survey"] for by in ("kl", "hawq"))
    assert simple["all blocks"] > 0 and second["derivatives"] > 3 * simple["derivatives"] > 0
    assert not any("survey" in where for where in needs("sensitivity"))


def test_an_output_head_is_refused(tiny, ids):
    step = compress.RTN(group_size=16, targets=["*", "lm_head"], allocate={"bits": 4.0, "choices": CHOICES})
    with pytest.raises(TargetError, match="it divides a budget among the linears inside the blocks"):
        compress.apply(tiny("llama", tie_word_embeddings=False), step, ids(2, 16))


def test_a_budget_without_layers_is_an_error(pico_model, pico_ids):
    step = compress.RTN(allocate={"bits": 3.0}, overrides={"*": {"weights": "int8"}})
    with pytest.raises(TargetError, match="allocate: overrides name all of its layers; leave allocate out"):
        compress.apply(pico_model, step, pico_ids)


def test_a_run_stores_what_was_decided(pico, texts, tmp_path):
    step = compress.GPTQ(group_size=32, allocate={"bits": 3.5, "choices": CHOICES})
    calibration = compress.Calibration(source=texts["calibration"], sequences=None, length=None)
    asked = Recipe(model=pico, passes=[step], calibration=calibration, save={"format": "compressed-tensors"})
    result = compress.run(asked, tmp_path / "out", progress=False)
    model, _ = compress.load(result.folder)
    assert len(set(stored(model).values())) == 2 and mean_bits(model) <= 3.5
    again = compress.run(asked, tmp_path / "out", progress=False)
    assert stored(compress.load(again.folder)[0]) == stored(model)
