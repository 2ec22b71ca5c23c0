"""The sparsity that was asked for is that of the checkpoint: by hand, end to end, and every way in which it is not."""

import pytest
import torch
from torch import nn

import compress
from compress import Magnitude, Wanda
from compress.errors import NumericError, TargetError, VerificationError
from compress.evaluation.sparsity import check_sparsity
from compress.passes.contract.layers import Solution
from compress.passes.contract.passes import LayerPass
from compress.report.render import markdown
from compress.results.result import RunResult

NAMES = ["a", "b"]


def model_of(**zeros):
    """Linears of 4 x 5 with so many zeros each."""
    model = nn.Module()
    for name, count in zeros.items():
        layer = nn.Linear(5, 4, bias=False)
        layer.weight.data = torch.ones(4, 5)
        layer.weight.data.view(-1)[:count] = 0
        setattr(model, name, layer)
    return model


def result(name, asked, due, by="passes[0]"):
    return {"layer": name, "by": by, "error": None, "sparsity": due, "asked": asked, "due": due}


def steps_of(*passes):
    return [(f"passes[{i}]", step, NAMES) for i, step in enumerate(passes)]


def test_the_section_by_hand():
    found = check_sparsity(
        steps_of(Magnitude(sparsity=0.5)), [result("a", 0.4, 0.4), result("b", 0.6, 0.6)], model_of(a=8, b=14)
    )
    assert found == {
        "asked": pytest.approx(0.5),
        "due": pytest.approx(0.5),
        "achieved": 22 / 40,
        "layers": {"a": {"asked": 0.4, "due": 0.4, "achieved": 0.4}, "b": {"asked": 0.6, "due": 0.6, "achieved": 0.7}},
    }


def test_a_tail_is_not_due():
    results = [result("a", 0.5, 0.4), result("b", 0.5, 0.4)]  # 2:4 of five columns
    found = check_sparsity(steps_of(Magnitude(pattern="2:4")), results, model_of(a=8, b=8))
    assert (found["asked"], found["due"], found["achieved"]) == pytest.approx((0.5, 0.4, 0.4))


def test_the_most_that_any_pass_owed_counts():
    results = [result(n, 0.5, 0.5) for n in NAMES] + [result(n, 0.25, 0.25, "passes[1]") for n in NAMES]
    steps = steps_of(Magnitude(), Wanda(sparsity=0.25))
    assert check_sparsity(steps, results, model_of(a=10, b=11))["due"] == 0.5
    with pytest.raises(VerificationError, match="b: 10 weights must be zero, but the checkpoint has 9"):
        check_sparsity(steps, results, model_of(a=10, b=9))


def test_a_layer_that_a_pass_has_not_pruned_is_an_error():
    with pytest.raises(VerificationError, match=r"passes\[0\]: b was not pruned, and 0 more"):
        check_sparsity(steps_of(Magnitude()), [result("a", 0.5, 0.5)], model_of(a=10, b=10))


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_an_allocation_that_asks_for_another_sparsity_in_all_is_an_error(share):
    results = [result(name, share, share) for name in NAMES]
    with pytest.raises(VerificationError, match="sparsity 0.5 was asked, but the mean of the layers is"):
        check_sparsity(steps_of(Magnitude()), results, model_of(a=20, b=20))


def test_without_pruning_there_is_nothing_to_tell(recipe, tiny_folder, tmp_path):
    assert check_sparsity([("passes[0]", compress.RTN(), NAMES)], [], model_of(a=0, b=0)) is None
    asked = recipe(compress.RTN(group_size=16), model=tiny_folder("llama"), save={"format": "native"})
    report = compress.run(asked, tmp_path / "out").report
    assert report["sparsity"] is None and "## Sparsity" not in markdown(RunResult.from_json(report))


@pytest.mark.parametrize(
    ("family", "format_"), [("llama", "dense"), ("llama", "native"), ("mixtral", "dense"), ("gpt2", "dense")]
)
def test_a_run_tells_the_zeros_of_every_layer_of_its_checkpoint(family, format_, recipe, tiny_folder, tmp_path):
    steps = [Wanda(sparsity=0.5, allocate="owl")]
    if format_ == "native":
        steps.append(compress.GPTQ(weights="int4", group_size=16, symmetric=False))
    asked = recipe(*steps, model=tiny_folder(family), save={"format": format_, "verify": "own"})
    result = compress.run(asked, tmp_path / "out")
    found = result.report["sparsity"]
    loaded, _ = compress.load(result.folder)
    assert found["asked"] == pytest.approx(0.5, abs=1e-3)
    assert found["due"] == pytest.approx(0.5, abs=0.02) and found["achieved"] >= found["due"]
    assert len(found["layers"]) > 10
    for name, layer in found["layers"].items():
        weight = loaded.get_submodule(name).weight
        assert layer["achieved"] == int((weight == 0).sum()) / weight.numel() >= layer["due"]
    page = markdown(RunResult.from_json(result.report))
    assert f"Of {len(found['layers'])} layers; expected: in whole units of the pattern" in page
    assert f"| all, by weight | {found['asked']:.4f} | {found['due']:.4f} | {found['achieved']:.4f} |" in page


def test_results_of_sweeps_before_a_pass_of_the_whole_model_are_told(recipe, tiny_folder, tmp_path, monkeypatch):
    from test_contract import Doubled

    asked = recipe(Wanda(sparsity=0.5), Doubled(), model=tiny_folder("llama"), save={"format": "dense"})
    report = compress.run(asked, tmp_path / "out").report
    assert {r["by"] for r in report["layers"]} == {"passes[0] wanda"} and report["sparsity"]["achieved"] >= 0.5


class Forgets(Magnitude):
    """A mask that removes nothing."""

    def prune(self, weight, seen, layer, sparsity):
        right = super().prune(weight, seen, layer, sparsity)
        return Solution(weight, torch.ones_like(right.mask), zeros=right.zeros)


class TakesMore(Magnitude):
    """A mask that removes everything."""

    def prune(self, weight, seen, layer, sparsity):
        right = super().prune(weight, seen, layer, sparsity)
        return Solution(0 * weight, torch.zeros_like(right.mask), zeros=right.zeros)


@pytest.mark.parametrize(("kind", "removed"), [(Forgets, 0), (TakesMore, 1024)])
def test_a_mask_of_another_size_is_an_error_at_once(kind, removed, tiny, ids):
    message = rf"model.layers.0.self_attn.q_proj: sparsity 0.5 requires 512 removed weights, but {removed} were removed"
    with pytest.raises(VerificationError, match=message):
        compress.apply(tiny("llama"), [kind()], ids())


class Regrows(LayerPass):
    """Writes over what was pruned."""

    paper = "https://example.org/regrows"

    def solve(self, weight, seen, layer):
        return Solution(weight + 1)


def test_zeros_that_a_later_pass_fills_in_are_an_error(recipe, tiny_folder, tmp_path):
    asked = recipe(Magnitude(), Regrows(), model=tiny_folder("llama"), save={"format": "dense", "verify": "own"})
    with pytest.raises(NumericError, match=r"q_proj: weights that were pruned are no longer zero"):
        compress.run(asked, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pattern": "2:64"},
            r"passes\[0\] magnitude: model.layers.0.self_attn.q_proj: pattern 2:64 has no whole unit",
        ),
        ({"pattern": "64x1"}, "pattern 64x1 has no whole unit in its 32 rows of 32"),
        ({"pattern": "row", "sparsity": 0.01}, "sparsity 0.01 of its 32 rows of 32 is not one unit of pattern row"),
    ],
)
def test_a_layer_too_small_for_what_is_asked_is_refused_before_any_work(
    options, message, recipe, tiny_folder, tmp_path
):
    asked = recipe(Magnitude(**options), model=tiny_folder("llama"), save={"format": "dense"})
    with pytest.raises(TargetError, match=message):
        compress.plan(asked)
    with pytest.raises(TargetError, match=message):
        compress.run(asked, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_joint_pruning_and_rounding_is_planned_as_it_ends(recipe, tiny_folder, tmp_path):
    asked = recipe(
        compress.SparseGPT(pattern="2:4", weights="int4", group_size=16),
        model=tiny_folder("llama"),
        save={"format": "compressed-tensors"},
    )
    predicted = compress.plan(asked)
    report = compress.run(asked, tmp_path / "out").report
    assert predicted.layers[0].scheme.codes.grid.name == "int4"
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"] == predicted.checkpoint_bytes
    assert report["sparsity"]["achieved"] >= 0.5


def test_joint_rounding_is_held_to_what_the_format_and_the_layer_can_have(recipe, tiny_folder):
    lost = recipe(
        compress.SparseGPT(weights="int4", group_size=64), model=tiny_folder("llama"), save={"format": "native"}
    )
    with pytest.raises(TargetError, match="group_size 64 is larger than its 32 inputs"):
        compress.plan(lost)
    lost = recipe(compress.SparseGPT(weights="nf4", group_size=16), model=tiny_folder("llama"))
    with pytest.raises(TargetError, match="sparsegpt: model.layers.0.self_attn.q_proj"):
        compress.plan(lost)
    with pytest.raises(compress.CompressError, match="quantized twice"):
        recipe(compress.SparseGPT(weights="int4"), compress.GPTQ())
