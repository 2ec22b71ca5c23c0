"""How sparsity is shared out: as it is written, what each way decides of a real model, and that the look leaves no trace."""

import pytest
import torch
import yaml
from batches import batch_of
from pydantic import ValidationError

import compress
from compress import Recipe
from compress.blockwise.sweep import Sweep
from compress.errors import RecipeError, TargetError
from compress.layers.linear import linears
from compress.models.experts import open_experts
from compress.numerics.metrics import relative_error
from compress.numerics.sparse.masks import Pattern
from compress.passes.contract.context import Run
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError
from compress.passes.families.allocation import OWL, Global, SensitivityAllocation, Uniform, read_allocation

STEPS = [
    compress.Magnitude(sparsity=0.5),
    compress.Wanda(sparsity=0.5),
    compress.RIA(sparsity=0.5, pattern="layer"),
    compress.SparseGPT(sparsity=0.5, pattern="layer"),
]
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.key())


def with_allocation(step, value):
    return type(step).model_validate({**step.model_dump(mode="json"), "allocate": value})


def swept(opened, batches, *steps, run=None):
    """The sweep after its work, whose `decided` can be looked at."""
    names = opened.linear_names()
    labelled = [(f"passes[{i}]", step, names) for i, step in enumerate(steps)]
    probe = batch_of(batches[0][:1] if batches else torch.arange(8)[None])
    sweep = Sweep(opened, labelled, [batch_of(ids) for ids in batches], probe, run or Run())
    sweep(lambda *_: None, lambda _: False)
    return sweep


@pytest.fixture
def batches(ids):
    return [ids(3, 16, seed=1), ids(2, 16, seed=2)]


# As it is written


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("uniform", Uniform()),
        ("global", Global()),
        ("owl", OWL()),
        ({"owl": {"M": 7}}, OWL(M=7)),
        ({"owl": {"M": 5, "lambda": 0.04}}, OWL(lambda_=0.04)),
        ({"owl": None}, OWL()),
        ({"sensitivity": {"within": 0.2}}, SensitivityAllocation(within=0.2)),
        (OWL(M=3), OWL(M=3)),
    ],
)
def test_an_allocation_is_written_by_its_name_or_with_options(written, meant):
    assert read_allocation(written) == meant
    recipe = Recipe(model="m", passes=[compress.Wanda(allocate=written)])
    assert recipe.passes[0].allocate == meant
    assert Recipe.from_text(recipe.to_yaml()) == recipe


def test_it_is_spelled_as_it_is_read():
    spelled = yaml.safe_load(Recipe(model="m", passes=[compress.Wanda(allocate="owl")]).to_yaml())
    assert spelled["passes"][0]["wanda"]["allocate"] == {"owl": {"M": 5.0, "lambda": 0.08}}
    spelled = yaml.safe_load(Recipe(model="m", passes=[compress.Wanda()]).to_yaml())
    assert spelled["passes"][0]["wanda"]["allocate"] == "uniform"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("orl", r"allocate: allocation 'orl' is not known; did you mean 'owl'\?"),
        ("{owl: {M: 5, lamda: 0.1}}", r"allocate owl lamda: unknown option; did you mean 'lambda'\?"),
        ("{owl: {M: 0}}", "allocate owl M: input should be greater than 0, not 0"),
        ("{owl: {lambda: 0.5}}", "allocate owl lambda: input should be less than 0.5"),
        ("{sensitivity: {within: 1}}", "allocate sensitivity within: input should be less than 1"),
        ("{uniform: {M: 5}}", "allocate uniform M: unknown option"),
        ("{owl: 5}", "allocate owl: must be a mapping of options"),
        ("{owl: {}, global: {}}", "allocate: must be one of uniform, global, owl, sensitivity, or a mapping such as"),
        ("[owl]", "allocate: must be one of uniform"),
        ("5", "allocate: must be one of uniform"),
    ],
)
def test_a_mistake_says_where_it_is_and_what_is_right(written, message):
    with pytest.raises(RecipeError, match=rf"^r:3:\d+: passes\[0\] wanda {message}"):
        Recipe.from_text(f"model: m\npasses:\n  - wanda: {{sparsity: 0.5, allocate: {written}}}\n", "r")


@pytest.mark.parametrize("written", ["global", "owl", "sensitivity"])
def test_a_pattern_with_a_sparsity_of_its_own_cannot_be_allocated(written):
    with pytest.raises(OptionError, match=f"allocate: {written} needs different sparsities per layer, but pattern 2:4"):
        compress.Wanda(pattern="2:4", allocate=written)
    assert compress.Wanda(pattern="2:4", allocate="uniform").density == 0.5


# What is decided


@pytest.mark.few(8)
@every_step
@pytest.mark.parametrize("written", ["global", "owl", {"sensitivity": {"within": 0.2}}], ids=str)
def test_the_sparsity_of_all_layers_is_the_one_asked_for(step, written, pico_model, in_memory, ids):
    opened = in_memory(pico_model)
    batches = [ids(3, 32) * 5, ids(2, 32, seed=3) * 4]
    sweep = swept(opened, batches, with_allocation(step, written))
    layers = {name: layer for name, layer in linears(opened.model).items() if name in opened.linear_names()}
    allocated = sweep.allocated["passes[0]"]
    assert allocated.keys() == layers.keys() and len(set(allocated.values())) > 1
    zeros = {name: int((~layer.mask).sum()) for name, layer in layers.items()}
    sizes = {name: layer.mask.numel() for name, layer in layers.items()}
    for name, share in allocated.items():
        assert zeros[name] / sizes[name] == pytest.approx(share, abs=0.01)
    assert sum(zeros.values()) / sum(sizes.values()) == pytest.approx(0.5, abs=0.002)


def test_owl_counts_outliers_of_the_dense_model_block_by_block(tiny, in_memory, batches):
    """By hand, from what really comes by: D = share of |W_ij| ||X_j|| above M times its mean in the block."""
    dense, opened = tiny("llama"), in_memory(tiny("llama"))
    allocated = swept(opened, batches, compress.Wanda(sparsity=0.6, allocate={"owl": {"M": 3}})).allocated["passes[0]"]
    names, squares = opened.linear_names(), {}
    for name in names:
        squares[name] = torch.zeros(dense.get_submodule(name).in_features)
        dense.get_submodule(name).register_forward_pre_hook(
            lambda module, args, n=name: squares.update({n: squares[n] + args[0].flatten(0, 1).square().sum(0)})
        )
    with torch.no_grad():
        for ids in batches:
            dense(input_ids=ids)
    ratios = []
    for block in range(3):
        inside = [n for n in names if f".{block}." in n]
        metric = torch.cat([(dense.get_submodule(n).weight.abs() * squares[n].sqrt()).flatten() for n in inside])
        ratios.append(float((metric > 3 * metric.mean()).float().mean()))
    low, high = min(ratios), max(ratios)
    densities = [(ratio - low) / (high - low) * 0.16 for ratio in ratios]
    for name in names:
        block = int(name.split(".")[2])
        assert allocated[name] == pytest.approx(0.6 - (densities[block] - sum(densities) / 3), abs=1e-4)


def test_sensitivity_prunes_less_where_the_measured_error_is_more(pico_model, in_memory, ids):
    opened = in_memory(pico_model)
    names = opened.linear_names()
    dense = {name: opened.model.get_submodule(name).weight.detach().clone() for name in names}
    seen: dict[str, list] = {name: [] for name in names}
    batches = [ids(4, 32) * 5]
    handles = [
        opened.model.get_submodule(n).register_forward_pre_hook(lambda m, a, n=n: seen[n].append(a[0].flatten(0, 1)))
        for n in names
    ]
    with torch.no_grad():
        opened.model(input_ids=batches[0])
    for handle in handles:
        handle.remove()
    step = compress.Magnitude(sparsity=0.5, allocate={"sensitivity": {"within": 0.2}})
    allocated = swept(opened, batches, step).allocated["passes[0]"]

    def total(shares):
        errors = 0.0
        for name, weight in dense.items():
            rows, keep = torch.cat(seen[name]), Pattern("layer").keep(weight.abs(), 1 - shares[name])
            errors += relative_error(rows @ (weight * keep).T, rows @ weight.T) ** 2
        return errors

    assert total(allocated) < 0.97 * total(dict.fromkeys(names, 0.5))
    assert min(allocated.values()) >= 0.3 - 1e-9 and max(allocated.values()) <= 0.7 + 1e-9


def test_a_lambda_that_leaves_a_layer_nothing_is_an_error(tiny, in_memory, batches):
    with pytest.raises(TargetError, match="allocate owl: a layer would get a sparsity of .*; use a smaller lambda"):
        swept(in_memory(tiny("llama")), batches, compress.Wanda(sparsity=0.96, pattern="layer", allocate="owl"))


def test_a_layer_that_a_global_threshold_empties_is_told(tiny, in_memory):
    opened, run = in_memory(tiny("llama")), Run(journal=Journal())
    for name in linears(opened.blocks[1].module):
        opened.blocks[1].module.get_submodule(name).weight.data *= 1e-6
    swept(opened, [], compress.Magnitude(sparsity=0.5, allocate="global"), run=run)
    message = "the allocation removes all weights of this layer"
    (record,) = [entry for entry in run.journal.entries if entry.message == message]
    assert record.where.endswith("model.layers.1") and record.figures["linears"] == 7


# The look


def test_two_looks_at_once_are_each_the_look_alone(tiny, in_memory, batches):
    owl, sensitivity = compress.Wanda(allocate="owl"), compress.RIA(allocate="sensitivity")
    both = swept(in_memory(tiny("llama")), batches, owl, sensitivity).allocated
    assert both["passes[0]"] == swept(in_memory(tiny("llama")), batches, owl).allocated["passes[0]"]
    assert both["passes[1]"] == swept(in_memory(tiny("llama")), batches, sensitivity).allocated["passes[0]"]


def test_without_an_allocation_nothing_is_looked_at(tiny, in_memory, batches):
    assert swept(in_memory(tiny("llama")), batches, compress.Wanda(), compress.RTN(group_size=16)).allocated == {}


def test_what_goes_on_to_the_blocks_is_as_if_nobody_had_looked(tiny, in_memory, batches):
    """Sparsities that a look comes to (OWL's are those of whole blocks), given by hand, make the same weights."""
    one, other = in_memory(tiny("llama")), in_memory(tiny("llama"))
    allocated = swept(one, batches, compress.Wanda(sparsity=0.6, allocate="owl")).allocated["passes[0]"]
    names = other.linear_names()
    shares = {block: allocated[f"model.layers.{block}.mlp.up_proj"] for block in range(3)}
    steps = [
        (f"passes[{i}]", compress.Wanda(sparsity=share), [n for n in names if f".{i}." in n])
        for i, share in shares.items()
    ]
    Sweep(other, steps, [batch_of(ids) for ids in batches], batch_of(batches[0][:1]), Run())(
        lambda *_: None, lambda _: False
    )
    for name in names:
        assert torch.equal(one.model.get_submodule(name).weight, other.model.get_submodule(name).weight)


def test_an_expert_that_no_token_reached_is_looked_at_without_data(tiny, in_memory, ids):
    opened = in_memory(tiny("mixtral", num_local_experts=16))
    open_experts(opened.model)
    opened = in_memory(opened.model)
    sweep = swept(opened, [ids(1, 3)], compress.Wanda(sparsity=0.5, allocate="owl"))
    allocated = sweep.allocated["passes[0]"]
    assert len(allocated) == len(opened.linear_names())
    assert sum(allocated.values()) / len(allocated) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("written", ["global", "owl", "sensitivity"])
def test_a_killed_run_ends_with_the_same_bytes(written, recipe, tiny_folder, tmp_path, stop):
    asked = recipe(compress.Wanda(sparsity=0.5, allocate=written), model=tiny_folder("llama"), save={"format": "dense"})
    whole = compress.run(asked, tmp_path / "whole")
    stop(asked, tmp_path / "killed")
    again = compress.run(asked, tmp_path / "killed")
    assert again.report["checkpoint_sha256"] == whole.report["checkpoint_sha256"]
    assert again.report["sparsity"] == whole.report["sparsity"]


def test_options_of_an_allocation_are_all_told():
    for kind in (OWL, SensitivityAllocation):
        assert all(field.description for field in kind.model_fields.values())
    with pytest.raises(ValidationError, match="frozen"):
        OWL().M = 3
    assert hash(OWL()) == hash(OWL(M=5))
